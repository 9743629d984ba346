"""The ticket table against a reference that records every fact, and each of its rules separately."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import TicketState
from baton.v1.types_pb2 import Attempt
from services.common.engine.attempt_key import AttemptKey
from services.worker.engine.decode.ticket_table import TOMBSTONE_S, CommitOutcome, TicketTable
from tests.kvtransfer.support.peers import FakeClock

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
    """One ticket that was ever issued."""

    key: AttemptKey
    transfer: int
    deadline: float
    state: int


class TableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.table: TicketTable[str] = TicketTable(clock=self.clock)
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
                self.table.reserve(key, self.next_transfer, "grant", ttl)
            assert error.value.kind is ErrorKind.CONFLICT
            return
        existing = self.table.check(key)
        fact = self.live(key)
        assert (existing.transfer_id if existing else None) == (fact.transfer if fact else None)
        if existing is None:
            lower = [e.transfer_id for e in self.table.superseded(key)]
            mine = [f for f in self.facts if f.state != ENDED and f.key.request_id == key.request_id]
            assert sorted(lower) == sorted(f.transfer for f in mine if f.key.number < key.number)
            self.table.reserve(key, self.next_transfer, "grant", ttl)
            self.facts.append(Fact(key, self.next_transfer, self.clock.now + ttl, RESERVED))
            self.next_transfer += 1

    @rule(transfer=transfers)
    def receiving(self, transfer: int) -> None:
        fact = self.of(transfer)
        changes = fact is not None and fact.state == RESERVED
        assert self.table.receiving(transfer) == changes
        if fact is not None and changes:
            fact.state = RECEIVING

    @rule(transfer=transfers)
    def commit(self, transfer: int) -> None:
        fact = self.of(transfer)
        outcome = self.table.commit(transfer)
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
        assert self.table.activate(transfer) == changes
        if fact is not None and changes:
            fact.state = ACTIVE

    @rule(transfer=transfers)
    def end(self, transfer: int) -> None:
        fact = self.of(transfer)
        entry = self.table.end(transfer)
        assert (entry.key if entry else None) == (fact.key if fact else None)
        if fact is not None:
            self.finish(fact)

    @rule(key=keys)
    def cancel(self, key: AttemptKey) -> None:
        fact = self.live(key)
        entry = self.table.cancel(key)
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
        assert self.table.live == len(living)
        assert self.table.tombstones == sum(map(self.entombed, self.buried))
        for fact in living:
            assert self.table.state(fact.key) == fact.state
        awaited = (RESERVED, RECEIVING)
        late = {
            f.transfer for f in living if self.clock.now >= f.deadline + (0.0 if f.state in awaited else 0.5)
        }
        assert {entry.transfer_id for entry in self.table.expired()} == late
        for key in self.buried:
            if self.live(key) is None:
                assert self.table.state(key) == (ENDED if self.entombed(key) else UNKNOWN)


TableMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
)
TestBook = TableMachine.TestCase


KEY = AttemptKey(b"r", 1)


def reserved(clock: FakeClock | None = None, ttl_s: float = 10.0) -> TicketTable[str]:
    """A table with one reserved ticket: attempt 1 of request `r`, transfer 9."""
    table: TicketTable[str] = TicketTable(clock=clock or FakeClock())
    table.reserve(KEY, 9, "blocks", ttl_s)
    return table


def test_a_key_is_made_of_the_wire_message() -> None:
    assert AttemptKey.of(Attempt(request_id=b"request", number=3)) == AttemptKey(b"request", 3)


def test_a_ticket_goes_through_all_its_states_once() -> None:
    table = reserved()
    entry = table.find(KEY)
    assert entry is not None
    assert table.find_transfer(9) is entry
    assert table.check(KEY) is entry
    assert (entry.key, entry.transfer_id, entry.reservation, entry.state) == (KEY, 9, "blocks", RESERVED)
    assert table.receiving(9)
    assert not table.receiving(9)
    assert (entry.state, entry.awaited) == (RECEIVING, True)
    assert not table.activate(9), "it was never committed"
    assert table.commit(9) is CommitOutcome.ACCEPTED
    assert (entry.state, entry.awaited) == (COMMITTED, False)
    assert not table.receiving(9)
    assert table.activate(9)
    assert not table.activate(9)
    assert table.state(KEY) == ACTIVE
    assert table.end(9) is entry
    assert (entry.state, table.state(KEY), table.live, table.tombstones) == (ENDED, ENDED, 0, 1)
    assert table.find(KEY) is None
    assert table.find_transfer(9) is None


@pytest.mark.parametrize("active", [False, True])
def test_a_ticket_commits_once(active: bool) -> None:
    """A second commit must not admit a second sequence, whatever state the first has reached."""
    table = reserved()
    assert table.commit(9) is CommitOutcome.ACCEPTED
    assert not active or table.activate(9)
    state = table.state(KEY)
    assert table.commit(9) is CommitOutcome.REPEATED
    assert table.state(KEY) == state


def test_a_commit_in_time_is_repeated_and_not_expired_later() -> None:
    clock = FakeClock()
    table = reserved(clock)
    assert table.commit(9) is CommitOutcome.ACCEPTED
    clock.now += 10.25
    assert table.commit(9) is CommitOutcome.REPEATED
    assert table.expired() == [], "the sequence may end by itself for a while"


def test_an_unknown_or_ended_transfer_takes_nothing() -> None:
    table = reserved()
    assert table.end(9) is not None
    for transfer in (9, 8):
        assert table.commit(transfer) is CommitOutcome.UNKNOWN
        assert not table.receiving(transfer)
        assert not table.activate(transfer)
        assert table.end(transfer) is None


@pytest.mark.parametrize("receiving", [False, True])
def test_a_ticket_expires_at_its_deadline(receiving: bool) -> None:
    clock = FakeClock()
    table = reserved(clock, ttl_s=10.0)
    assert not receiving or table.receiving(9)
    clock.now += 9.99
    assert table.expired() == []
    clock.now += 0.01
    assert [entry.transfer_id for entry in table.expired()] == [9]
    assert table.commit(9) is CommitOutcome.EXPIRED
    assert table.state(KEY) == (RECEIVING if receiving else RESERVED), "its owner ends it"


def test_reserving_what_is_live_is_a_conflict() -> None:
    table = reserved()
    for key, transfer in ((KEY, 10), (AttemptKey(b"s", 1), 9)):
        with pytest.raises(BatonError) as error:
            table.reserve(key, transfer, "others", 10.0)
        assert error.value.kind is ErrorKind.CONFLICT
        assert str(error.value) == "attempt 1 or its transfer id is live already"
    assert table.live == 1


def test_a_lower_attempt_is_superseded_and_an_ended_one_refused() -> None:
    table = reserved()
    table.reserve(AttemptKey(b"r", 3), 10, "more", 10.0)
    assert [entry.transfer_id for entry in table.superseded(AttemptKey(b"r", 3))] == [9]
    assert [entry.transfer_id for entry in table.superseded(AttemptKey(b"r", 4))] == [9, 10]
    assert table.superseded(AttemptKey(b"r", 1)) == []
    assert table.superseded(AttemptKey(b"other", 4)) == []
    with pytest.raises(BatonError, match=r"^attempt 2 is superseded by attempt 3$") as error:
        table.check(AttemptKey(b"r", 2))
    assert error.value.kind is ErrorKind.CONFLICT
    table.end(10)
    with pytest.raises(BatonError, match=r"^attempt 3 has ended already$") as error:
        table.check(AttemptKey(b"r", 3))
    assert error.value.kind is ErrorKind.CONFLICT
    assert [entry.transfer_id for entry in table.superseded(AttemptKey(b"r", 4))] == [9], (
        "a tombstone is not live"
    )


def test_a_tombstone_expires_completely() -> None:
    clock = FakeClock()
    table = reserved(clock)
    table.end(9)
    clock.now += TOMBSTONE_S - 0.01
    assert (table.tombstones, table.state(KEY)) == (1, ENDED)
    clock.now += 0.01
    assert (table.tombstones, table.state(KEY)) == (0, UNKNOWN)
    assert table.check(KEY) is None
    table.reserve(KEY, 9, "again", 10.0)
    assert table.state(KEY) == RESERVED


def test_forgetting_one_attempt_keeps_the_others() -> None:
    clock = FakeClock()
    table: TicketTable[None] = TicketTable(clock=clock)
    table.cancel(AttemptKey(b"r", 1))
    clock.now += 1
    table.cancel(AttemptKey(b"r", 2))
    clock.now += TOMBSTONE_S - 1
    assert table.tombstones == 1
    with pytest.raises(BatonError, match="superseded by attempt 2"):
        table.check(AttemptKey(b"r", 1))


def test_a_second_cancel_renews_the_tombstone() -> None:
    clock = FakeClock()
    table: TicketTable[None] = TicketTable(clock=clock)
    table.cancel(KEY)
    table.cancel(AttemptKey(b"s", 1))
    clock.now += 20
    table.cancel(KEY)
    clock.now += 15
    assert table.state(KEY) == ENDED
    assert table.state(AttemptKey(b"s", 1)) == UNKNOWN, "the renewed one moved behind it"


def test_a_cancel_ends_a_live_ticket() -> None:
    table = reserved()
    entry = table.cancel(KEY)
    assert entry is not None
    assert (entry.reservation, table.live, table.tombstones) == ("blocks", 0, 1)


def test_a_running_sequence_expires_shortly_after_its_deadline() -> None:
    clock = FakeClock()
    table: TicketTable[str] = TicketTable(clock=clock)
    table.reserve(AttemptKey(b"r", 1), 9, "blocks", 10)
    table.commit(9)
    table.activate(9)
    clock.now += 10.25
    assert table.expired() == []
    clock.now += 0.25
    assert [entry.key for entry in table.expired()] == [AttemptKey(b"r", 1)]


def test_tombstones_are_bounded_and_the_oldest_is_dropped_first() -> None:
    table: TicketTable[None] = TicketTable(clock=FakeClock(), max_tombstones=3)
    for number in range(5):
        table.cancel(AttemptKey(bytes([number]), 1))
    assert table.tombstones == 3
    assert table.state(AttemptKey(bytes([1]), 1)) == UNKNOWN
    assert table.state(AttemptKey(bytes([2]), 1)) == ENDED


def test_a_reserved_ticket_commits_without_a_byte() -> None:
    table: TicketTable[str] = TicketTable(clock=FakeClock())
    table.reserve(AttemptKey(b"r", 1), 9, "blocks", 10)
    assert table.commit(9) is CommitOutcome.ACCEPTED
    assert table.activate(9)
    ended = table.end(9)
    assert ended is not None
    assert ended.reservation == "blocks"
    assert table.end(9) is None


def test_a_cancel_before_the_reserve_refuses_it() -> None:
    table: TicketTable[None] = TicketTable(clock=FakeClock())
    assert table.cancel(AttemptKey(b"r", 2)) is None
    for number in (1, 2):
        with pytest.raises(BatonError):
            table.check(AttemptKey(b"r", number))
    assert table.check(AttemptKey(b"r", 3)) is None
