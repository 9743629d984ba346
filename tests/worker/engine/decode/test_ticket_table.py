"""The ticket book against a model that records every fact, and each rule of the book by itself."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import TicketState
from baton.v1.types_pb2 import Attempt
from services.common.engine.attempt_key import AttemptKey
from services.worker.engine.decode.ticket_table import TOMBSTONE_S, CommitOutcome, TicketTable
from tests.kvtransfer.peers import FakeClock

RESERVED = TicketState.TICKET_STATE_RESERVED
RECEIVING = TicketState.TICKET_STATE_RECEIVING
COMMITTED = TicketState.TICKET_STATE_COMMITTED
ACTIVE = TicketState.TICKET_STATE_ACTIVE
ENDED = TicketState.TICKET_STATE_ENDED
UNKNOWN = TicketState.TICKET_STATE_UNSPECIFIED

keys = st.builds(AttemptKey, st.sampled_from([b"a", b"b"]), st.integers(1, 4))
# Few enough that most rules meet a transfer that exists.
transfers = st.integers(1, 6)


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
        self.book: TicketTable[str] = TicketTable(clock=self.clock)
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
        awaited = (RESERVED, RECEIVING)
        late = {
            f.transfer for f in living if self.clock.now >= f.deadline + (0.0 if f.state in awaited else 0.5)
        }
        assert {entry.transfer_id for entry in self.book.expired()} == late
        for key in self.buried:
            if self.live(key) is None:
                assert self.book.state(key) == (ENDED if self.entombed(key) else UNKNOWN)


BookMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
)
TestBook = BookMachine.TestCase


KEY = AttemptKey(b"r", 1)


def reserved(clock: FakeClock | None = None, ttl_s: float = 10.0) -> TicketTable[str]:
    """A book with one reserved ticket: attempt 1 of request `r`, transfer 9."""
    book: TicketTable[str] = TicketTable(clock=clock or FakeClock())
    book.reserve(KEY, 9, "blocks", ttl_s)
    return book


def test_a_key_is_made_of_the_wire_message() -> None:
    assert AttemptKey.of(Attempt(request_id=b"request", number=3)) == AttemptKey(b"request", 3)


def test_a_ticket_goes_through_all_its_states_once() -> None:
    book = reserved()
    entry = book.find(KEY)
    assert entry is not None
    assert book.find_transfer(9) is entry
    assert book.check(KEY) is entry
    assert (entry.key, entry.transfer_id, entry.reservation, entry.state) == (KEY, 9, "blocks", RESERVED)
    assert book.receiving(9)
    assert not book.receiving(9)
    assert (entry.state, entry.awaited) == (RECEIVING, True)
    assert not book.activate(9), "it was never committed"
    assert book.commit(9) is CommitOutcome.ACCEPTED
    assert (entry.state, entry.awaited) == (COMMITTED, False)
    assert not book.receiving(9)
    assert book.activate(9)
    assert not book.activate(9)
    assert book.state(KEY) == ACTIVE
    assert book.end(9) is entry
    assert (entry.state, book.state(KEY), book.live, book.tombstones) == (ENDED, ENDED, 0, 1)
    assert book.find(KEY) is None
    assert book.find_transfer(9) is None


@pytest.mark.parametrize("active", [False, True])
def test_a_ticket_commits_once(active: bool) -> None:
    """A second commit must not admit a second sequence, whatever state the first has reached."""
    book = reserved()
    assert book.commit(9) is CommitOutcome.ACCEPTED
    assert not active or book.activate(9)
    state = book.state(KEY)
    assert book.commit(9) is CommitOutcome.REPEATED
    assert book.state(KEY) == state


def test_a_commit_in_time_is_repeated_and_not_expired_later() -> None:
    clock = FakeClock()
    book = reserved(clock)
    assert book.commit(9) is CommitOutcome.ACCEPTED
    clock.now += 10.25
    assert book.commit(9) is CommitOutcome.REPEATED
    assert book.expired() == [], "a moment is left for the sequence to end by itself"


def test_an_unknown_or_ended_transfer_takes_nothing() -> None:
    book = reserved()
    assert book.end(9) is not None
    for transfer in (9, 8):
        assert book.commit(transfer) is CommitOutcome.UNKNOWN
        assert not book.receiving(transfer)
        assert not book.activate(transfer)
        assert book.end(transfer) is None


@pytest.mark.parametrize("receiving", [False, True])
def test_a_ticket_expires_at_its_deadline(receiving: bool) -> None:
    clock = FakeClock()
    book = reserved(clock, ttl_s=10.0)
    assert not receiving or book.receiving(9)
    clock.now += 9.99
    assert book.expired() == []
    clock.now += 0.01
    assert [entry.transfer_id for entry in book.expired()] == [9]
    assert book.commit(9) is CommitOutcome.EXPIRED
    assert book.state(KEY) == (RECEIVING if receiving else RESERVED), "its owner ends it"


def test_reserving_what_is_live_is_a_conflict() -> None:
    book = reserved()
    for key, transfer in ((KEY, 10), (AttemptKey(b"s", 1), 9)):
        with pytest.raises(BatonError) as error:
            book.reserve(key, transfer, "others", 10.0)
        assert error.value.kind is ErrorKind.CONFLICT
        assert str(error.value) == "attempt 1 or its transfer id is live already"
    assert book.live == 1


def test_a_lower_attempt_is_superseded_and_an_ended_one_refused() -> None:
    book = reserved()
    book.reserve(AttemptKey(b"r", 3), 10, "more", 10.0)
    assert [entry.transfer_id for entry in book.superseded(AttemptKey(b"r", 3))] == [9]
    assert [entry.transfer_id for entry in book.superseded(AttemptKey(b"r", 4))] == [9, 10]
    assert book.superseded(AttemptKey(b"r", 1)) == []
    assert book.superseded(AttemptKey(b"other", 4)) == []
    with pytest.raises(BatonError, match=r"^attempt 2 is superseded by attempt 3$") as error:
        book.check(AttemptKey(b"r", 2))
    assert error.value.kind is ErrorKind.CONFLICT
    book.end(10)
    with pytest.raises(BatonError, match=r"^attempt 3 has ended already$") as error:
        book.check(AttemptKey(b"r", 3))
    assert error.value.kind is ErrorKind.CONFLICT
    assert [entry.transfer_id for entry in book.superseded(AttemptKey(b"r", 4))] == [9], (
        "a tombstone is not live"
    )


def test_a_tombstone_expires_completely() -> None:
    clock = FakeClock()
    book = reserved(clock)
    book.end(9)
    clock.now += TOMBSTONE_S - 0.01
    assert (book.tombstones, book.state(KEY)) == (1, ENDED)
    clock.now += 0.01
    assert (book.tombstones, book.state(KEY)) == (0, UNKNOWN)
    assert book.check(KEY) is None
    book.reserve(KEY, 9, "again", 10.0)
    assert book.state(KEY) == RESERVED


def test_forgetting_one_attempt_keeps_the_others() -> None:
    clock = FakeClock()
    book: TicketTable[None] = TicketTable(clock=clock)
    book.cancel(AttemptKey(b"r", 1))
    clock.now += 1
    book.cancel(AttemptKey(b"r", 2))
    clock.now += TOMBSTONE_S - 1
    assert book.tombstones == 1
    with pytest.raises(BatonError, match="superseded by attempt 2"):
        book.check(AttemptKey(b"r", 1))


def test_a_second_cancel_renews_the_tombstone() -> None:
    clock = FakeClock()
    book: TicketTable[None] = TicketTable(clock=clock)
    book.cancel(KEY)
    book.cancel(AttemptKey(b"s", 1))
    clock.now += 20
    book.cancel(KEY)
    clock.now += 15
    assert book.state(KEY) == ENDED
    assert book.state(AttemptKey(b"s", 1)) == UNKNOWN, "the renewed one moved behind it"


def test_a_cancel_ends_a_live_ticket() -> None:
    book = reserved()
    entry = book.cancel(KEY)
    assert entry is not None
    assert (entry.reservation, book.live, book.tombstones) == ("blocks", 0, 1)


def test_a_running_sequence_expires_shortly_after_its_deadline() -> None:
    clock = FakeClock()
    book: TicketTable[str] = TicketTable(clock=clock)
    book.reserve(AttemptKey(b"r", 1), 9, "blocks", 10)
    book.commit(9)
    book.activate(9)
    clock.now += 10.25
    assert book.expired() == []
    clock.now += 0.25
    assert [entry.key for entry in book.expired()] == [AttemptKey(b"r", 1)]


def test_tombstones_are_bounded_and_the_oldest_is_dropped_first() -> None:
    book: TicketTable[None] = TicketTable(clock=FakeClock(), max_tombstones=3)
    for number in range(5):
        book.cancel(AttemptKey(bytes([number]), 1))
    assert book.tombstones == 3
    assert book.state(AttemptKey(bytes([1]), 1)) == UNKNOWN
    assert book.state(AttemptKey(bytes([2]), 1)) == ENDED


def test_a_reserved_ticket_commits_without_a_byte() -> None:
    book: TicketTable[str] = TicketTable(clock=FakeClock())
    book.reserve(AttemptKey(b"r", 1), 9, "blocks", 10)
    assert book.commit(9) is CommitOutcome.ACCEPTED
    assert book.activate(9)
    ended = book.end(9)
    assert ended is not None
    assert ended.reservation == "blocks"
    assert book.end(9) is None


def test_a_cancel_before_the_reserve_refuses_it() -> None:
    book: TicketTable[None] = TicketTable(clock=FakeClock())
    assert book.cancel(AttemptKey(b"r", 2)) is None
    for number in (1, 2):
        with pytest.raises(BatonError):
            book.check(AttemptKey(b"r", number))
    assert book.check(AttemptKey(b"r", 3)) is None
