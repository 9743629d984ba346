"""The ticket book against a model that keeps every fact in the plainest way."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import TicketState
from kvtransfer.ticket_book import AttemptKey, CommitOutcome, TicketBook
from tests.kvtransfer.peers import FakeClock

RESERVED = TicketState.TICKET_STATE_RESERVED
RECEIVING = TicketState.TICKET_STATE_RECEIVING
COMMITTED = TicketState.TICKET_STATE_COMMITTED
ACTIVE = TicketState.TICKET_STATE_ACTIVE
ENDED = TicketState.TICKET_STATE_ENDED
UNKNOWN = TicketState.TICKET_STATE_UNSPECIFIED

keys = st.builds(AttemptKey, st.sampled_from([b"a", b"b"]), st.integers(1, 4))
transfers = st.integers(1, 40)


@dataclass
class Fact:
    """One promise ever made, kept for ever."""

    key: AttemptKey
    transfer: int
    deadline: float
    state: int


class BookMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.book: TicketBook[str] = TicketBook(clock=self.clock)
        self.facts: list[Fact] = []
        self.buried: dict[AttemptKey, float] = {}
        self.next_transfer = 1

    def live(self, key: AttemptKey) -> Fact | None:
        return next((fact for fact in self.facts if fact.key == key and fact.state != ENDED), None)

    def of(self, transfer: int) -> Fact | None:
        return next((f for f in self.facts if f.transfer == transfer and f.state != ENDED), None)

    def entombed(self, key: AttemptKey) -> bool:
        return key in self.buried and self.clock.now < self.buried[key]

    def refused(self, key: AttemptKey) -> bool:
        seen = [fact.key for fact in self.facts if fact.state != ENDED]
        seen += [other for other in self.buried if self.entombed(other)]
        higher = any(other.request_id == key.request_id and other.number > key.number for other in seen)
        return self.entombed(key) or higher

    def finish(self, fact: Fact) -> None:
        fact.state = ENDED
        self.buried[fact.key] = self.clock.now + 30

    @rule(key=keys, ttl=st.sampled_from([1, 20, 100]))
    def reserve(self, key: AttemptKey, ttl: float) -> None:
        if self.refused(key):
            with pytest.raises(BatonError) as error:
                self.book.reserve(key, self.next_transfer, "grant", ttl)
            assert error.value.kind is ErrorKind.CONFLICT
            return
        existing = self.book.check(key)
        fact = self.live(key)
        assert (existing.transfer_id if existing else None) == (fact.transfer if fact else None)
        if existing is None:
            lower = [e.transfer_id for e in self.book.superseded(key)]
            mine = [f for f in self.facts if f.state != ENDED and f.key.request_id == key.request_id]
            assert sorted(lower) == sorted(f.transfer for f in mine if f.key.number < key.number)
            self.book.reserve(key, self.next_transfer, "grant", ttl)
            self.facts.append(Fact(key, self.next_transfer, self.clock.now + ttl, RESERVED))
            self.next_transfer += 1

    @rule(transfer=transfers)
    def receiving(self, transfer: int) -> None:
        fact = self.of(transfer)
        changes = fact is not None and fact.state == RESERVED
        assert self.book.receiving(transfer) == changes
        if fact is not None and changes:
            fact.state = RECEIVING

    @rule(transfer=transfers)
    def commit(self, transfer: int) -> None:
        fact = self.of(transfer)
        outcome = self.book.commit(transfer)
        if fact is None:
            assert outcome is CommitOutcome.UNKNOWN
        elif fact.state in (COMMITTED, ACTIVE):
            assert outcome is CommitOutcome.REPEATED
        elif self.clock.now >= fact.deadline:
            assert outcome is CommitOutcome.EXPIRED
        else:
            assert outcome is CommitOutcome.ACCEPTED
            fact.state = COMMITTED

    @rule(transfer=transfers)
    def activate(self, transfer: int) -> None:
        fact = self.of(transfer)
        changes = fact is not None and fact.state == COMMITTED
        assert self.book.activate(transfer) == changes
        if fact is not None and changes:
            fact.state = ACTIVE

    @rule(transfer=transfers)
    def end(self, transfer: int) -> None:
        fact = self.of(transfer)
        entry = self.book.end(transfer)
        assert (entry.key if entry else None) == (fact.key if fact else None)
        if fact is not None:
            self.finish(fact)

    @rule(key=keys)
    def cancel(self, key: AttemptKey) -> None:
        fact = self.live(key)
        entry = self.book.cancel(key)
        assert (entry.transfer_id if entry else None) == (fact.transfer if fact else None)
        if fact is not None:
            fact.state = ENDED
        self.buried[key] = self.clock.now + 30

    @rule(seconds=st.sampled_from([0.5, 5.0, 29.5, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def agrees(self) -> None:
        living = [fact for fact in self.facts if fact.state != ENDED]
        assert self.book.live == len(living)
        assert self.book.tombstones == sum(map(self.entombed, self.buried))
        for fact in living:
            assert self.book.state(fact.key) == fact.state
        late = {
            f.transfer for f in living if f.state in (RESERVED, RECEIVING) and self.clock.now >= f.deadline
        }
        assert {entry.transfer_id for entry in self.book.expired()} == late
        for key in self.buried:
            if self.live(key) is None:
                assert self.book.state(key) == (ENDED if self.entombed(key) else UNKNOWN)


BookMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestBook = BookMachine.TestCase


def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    book: TicketBook[None] = TicketBook(clock=FakeClock(), max_tombstones=3)
    for number in range(5):
        book.cancel(AttemptKey(bytes([number]), 1))
    assert book.tombstones == 3
    assert book.state(AttemptKey(bytes([1]), 1)) == UNKNOWN
    assert book.state(AttemptKey(bytes([2]), 1)) == ENDED


def test_a_reserved_ticket_commits_without_a_byte_when_the_blocks_only_change_owner() -> None:
    book: TicketBook[str] = TicketBook(clock=FakeClock())
    book.reserve(AttemptKey(b"r", 1), 9, "blocks", 10)
    assert book.commit(9) is CommitOutcome.ACCEPTED
    assert book.activate(9)
    ended = book.end(9)
    assert ended is not None
    assert ended.grant == "blocks"
    assert book.end(9) is None


def test_a_cancel_before_the_reserve_refuses_it() -> None:
    book: TicketBook[None] = TicketBook(clock=FakeClock())
    assert book.cancel(AttemptKey(b"r", 2)) is None
    for number in (1, 2):
        with pytest.raises(BatonError):
            book.check(AttemptKey(b"r", number))
    assert book.check(AttemptKey(b"r", 3)) is None
