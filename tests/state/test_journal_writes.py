"""Writes of the journal's writer to its store: the changes in each batch, and what an outage leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest
import structlog

from baton.base.errors import BatonError, ErrorKind
from baton.state import JournalRecord, new_journal_key
from baton.state.client.counters import Counters
from baton.state.journal import MAX_BATCH, MAX_BATCH_TOKENS, Journal
from baton.state.stores.records import JournalWrite
from baton.state.stores.seal import Seal
from tests.state.journal_reader import JournalEntry, ReadableJournal, ReadableSeal, read_journal

MAX_PENDING = 8


@dataclass
class RecordingStore:
    """Keeps each batch; fails while `away`. A write of `held_up` waits until that is set."""

    away: bool = False
    held_up: asyncio.Event | None = None
    writing: asyncio.Event = field(default_factory=asyncio.Event)
    batches: list[list[JournalWrite]] = field(default_factory=list)
    failures: int = 0

    async def write(self, writes: Sequence[JournalWrite]) -> None:
        if self.held_up is not None:
            self.writing.set()
            await self.held_up.wait()
        if self.away:
            self.failures += 1
            raise BatonError(ErrorKind.UNAVAILABLE, "away")
        self.batches.append(list(writes))

    async def read(self, request_id: bytes) -> JournalEntry | None:
        """The last entry that was appended for this request, with the attempt of its last mark."""
        entry = None
        for write in (write for batch in self.batches for write in batch if write.request_id == request_id):
            if write.action == "append":
                entry = JournalEntry(write.body, write.attempt)
            elif write.action == "attempt" and entry is not None:
                entry = JournalEntry(entry.body, write.attempt)
        return entry

    async def count_open(self) -> int:
        return 0


@dataclass
class Rig:
    """A journal, its store and its clock."""

    store: RecordingStore
    journal: Journal
    counters: Counters
    now: float = 100.0

    async def written(self) -> list[list[tuple[str, bytes, int]]]:
        """Every batch so far, once all that is pending has been written: kind, request and attempt."""
        assert await self.journal.flush(3)
        return [[(one.action, one.request_id, one.attempt) for one in batch] for batch in self.store.batches]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    store, counters = RecordingStore(), Counters()
    seal = ReadableSeal(new_journal_key(), "ours")
    made: Rig = Rig(
        store, ReadableJournal(store, seal, counters, lambda: made.now, max_pending=MAX_PENDING), counters
    )
    running = asyncio.create_task(made.journal.run())
    yield made
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def record(name: bytes, tokens: int = 3, details: bytes = b"") -> JournalRecord:
    return JournalRecord(name, "tenant", tuple(range(tokens)), 1, details)


async def outage(rig: Rig) -> None:
    """The store is away until a batch has failed."""
    rig.store.away = True
    before = rig.store.failures
    async with asyncio.timeout(3):
        while rig.store.failures == before:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_an_entry_is_appended_with_its_details_and_its_time_to_live(rig: Rig) -> None:
    receipt = rig.journal.append(record(b"a", details=b"sampling"), 60)
    assert not receipt.acknowledged
    assert await rig.written() == [[("append", b"a", 1)]]
    assert receipt.acknowledged
    assert rig.store.batches[0][0].ttl_s == pytest.approx(60.0)
    assert await read_journal(rig.journal, b"a") == record(b"a", details=b"sampling")
    assert await read_journal(rig.journal, b"b") is None


async def test_marks_and_closes_of_written_entries_are_writes_of_their_own(rig: Rig) -> None:
    rig.journal.append(record(b"a"), 60)
    rig.journal.append(record(b"b"), 60)
    await rig.written()
    rig.journal.mark_attempt(b"a", 2)
    assert (await rig.written())[1:] == [[("attempt", b"a", 2)]]
    rig.journal.close(b"b")
    assert (await rig.written())[2:] == [[("close", b"b", 0)]]
    assert rig.journal.pending == 0


async def test_closes_go_alone_and_first(rig: Rig) -> None:
    """A Redis without memory takes deletions, and nothing else."""
    rig.journal.append(record(b"a"), 60)
    await rig.written()
    rig.journal.append(record(b"b"), 60)
    rig.journal.close(b"a")
    assert (await rig.written())[1:] == [[("close", b"a", 0)], [("append", b"b", 1)]]


async def test_a_batch_ends_at_its_bound_of_tokens(rig: Rig) -> None:
    half = MAX_BATCH_TOKENS // 2
    for name, tokens in ((b"a", half), (b"b", half), (b"c", 1), (b"d", MAX_BATCH_TOKENS + 1), (b"e", 1)):
        rig.journal.append(record(name, tokens), 60)
        if name == b"c":
            await rig.written()
    batches = [[name for _, name, _ in batch] for batch in await rig.written()]
    assert batches == [[b"a", b"b"], [b"c"], [b"d"], [b"e"]]


async def test_marks_count_no_tokens(rig: Rig) -> None:
    rig.journal.append(record(b"a", MAX_BATCH_TOKENS), 60)
    await rig.written()
    rig.journal.mark_attempt(b"a", 2)
    rig.journal.append(record(b"b", MAX_BATCH_TOKENS), 60)
    assert [len(batch) for batch in await rig.written()] == [1, 2]


@pytest.mark.parametrize("closed", [False, True])
async def test_a_batch_ends_at_its_bound_of_changes(closed: bool) -> None:
    store, counters = RecordingStore(), Counters()
    journal = Journal(store, Seal(new_journal_key(), "ours"), counters, lambda: 0.0, max_pending=1024)
    for number in range(MAX_BATCH + 1):
        name = number.to_bytes(16, "big")
        if closed:
            journal.close(name)
        else:
            journal.mark_attempt(name, 2)
    running = asyncio.create_task(journal.run())
    assert await journal.flush(3)
    running.cancel()
    assert [len(batch) for batch in store.batches] == [MAX_BATCH, 1]


async def test_changes_meanwhile_merge_with_the_batch_that_failed(rig: Rig) -> None:
    one, other = rig.journal.append(record(b"a"), 60), rig.journal.append(record(b"b"), 60)
    await outage(rig)
    rig.journal.mark_attempt(b"a", 3)
    rig.journal.append(record(b"c"), 60)
    rig.store.away = False
    assert await rig.written() == [[("append", b"a", 3), ("append", b"b", 1), ("append", b"c", 1)]]
    assert one.acknowledged
    assert other.acknowledged
    assert rig.counters.journal_batches_failed == rig.store.failures


async def test_changes_during_a_write_that_fails_merge_with_it(rig: Rig) -> None:
    """The changes are newer than the batch under way, which may have arrived although it failed."""
    for name in (b"a", b"b", b"c", b"e"):
        rig.journal.append(record(name), 60)
    rig.store.away, rig.store.held_up = True, asyncio.Event()
    await asyncio.wait_for(rig.store.writing.wait(), 3)
    rig.journal.mark_attempt(b"a", 3)
    rig.journal.close(b"b")
    rig.journal.mark_attempt(b"e", 4)
    rig.journal.append(record(b"d"), 60)
    with structlog.testing.capture_logs() as logged:
        rig.store.held_up.set()
        async with asyncio.timeout(3):
            while not rig.store.failures:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    waits = {"event": "journal_write_failed", "part": "state", "changes": 4, "reason": "away"}
    assert logged == [waits | {"log_level": "debug"}]
    assert rig.journal.pending == 5
    rig.journal.close(b"a")
    rig.store.away = False
    assert await rig.written() == [
        [("close", b"a", 0), ("close", b"b", 0)],
        [("append", b"c", 1), ("append", b"e", 4), ("append", b"d", 1)],
    ]


async def test_an_entry_that_expires_unsent_is_not_put_back_and_others_are(rig: Rig) -> None:
    expired = rig.journal.append(record(b"a"), 5)
    rig.journal.append(record(b"b"), 60)
    rig.now += 5
    await outage(rig)
    assert expired.dropped
    assert rig.journal.pending == 1
    await outage(rig)
    assert rig.counters.journal_batches_failed == rig.store.failures >= 2
    rig.store.away = False
    assert await rig.written() == [[("append", b"b", 1)]]


async def test_a_failed_append_may_have_arrived_so_its_close_is_sent(rig: Rig) -> None:
    rig.journal.append(record(b"a"), 60)
    await outage(rig)
    rig.journal.close(b"a")
    rig.journal.mark_attempt(b"a", 2)
    assert rig.journal.pending == 1
    rig.store.away = False
    assert await rig.written() == [[("close", b"a", 0)]]


async def test_what_was_marked_while_it_failed_is_still_known_as_sent(rig: Rig) -> None:
    """Merging keeps that the store may have the entry, whichever of the two changes it came from."""
    rig.journal.append(record(b"a"), 60)
    await outage(rig)
    rig.journal.mark_attempt(b"a", 2)
    await outage(rig)
    rig.journal.close(b"a")
    rig.store.away = False
    assert await rig.written() == [[("close", b"a", 0)]]


async def test_an_entry_that_expires_before_it_is_written_is_dropped(rig: Rig) -> None:
    receipt, kept = rig.journal.append(record(b"a"), 5), rig.journal.append(record(b"b"), 6)
    await outage(rig)
    rig.now += 5
    rig.store.away = False
    assert await rig.written() == [[("append", b"b", 1)]]
    assert (receipt.acknowledged, receipt.dropped) == (False, True)
    assert kept.acknowledged
    assert rig.store.batches[0][0].ttl_s == pytest.approx(1.0)
    assert rig.counters.journal_dropped == 1


async def test_half_of_the_bound_is_kept_for_marks_and_closes(rig: Rig) -> None:
    rig.store.away = True
    receipts = [rig.journal.append(record(bytes([number])), 60) for number in range(5)]
    assert [one.dropped for one in receipts] == [False] * 4 + [True]
    for number in range(100, 107):
        rig.journal.mark_attempt(bytes([number]), 2)
    assert rig.journal.pending == MAX_PENDING
    assert rig.counters.journal_dropped == 1 + 3


async def test_an_odd_bound_rounds_down_for_appends() -> None:
    store, counters = RecordingStore(away=True), Counters()
    journal = Journal(store, Seal(new_journal_key(), "ours"), counters, lambda: 0.0, max_pending=3)
    assert [journal.append(record(bytes([number])), 60).dropped for number in range(2)] == [False, True]


def test_a_sealed_entry_keeps_details_and_tokens_apart() -> None:
    seal = ReadableSeal(new_journal_key(), "ours")
    for tenant, tokens, details in (
        ("", (), b""),
        ("t", (1, 2), b"xyz"),
        ("ten", (7,), b""),
        ("", (9,), b"d"),
    ):
        assert seal.unseal(b"r", seal.seal(b"r", tenant, tokens, details)) == (tenant, tokens, details)


def test_a_key_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(BatonError, match=r"^the journal's key has 32 bytes, not 31$") as refused:
        Seal(bytes(31), "ours")
    assert refused.value.kind is ErrorKind.INVALID
    with pytest.raises(BatonError, match=r"^a journal entry cannot be opened with this key$"):
        ReadableSeal(bytes(32), "ours").unseal(b"r", b"")


def test_entries_of_one_version_are_opened_by_the_next() -> None:
    """The additional data of the cipher is part of the format."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    plain = b"\x01\0\0\0\x02\0\0\0tdd" + (5).to_bytes(4, "little")
    sealed = b"\x01" + bytes(12) + AESGCM(bytes(32)).encrypt(bytes(12), plain, b"\x01baton journal ours r")
    assert ReadableSeal(bytes(32), "ours").unseal(b"r", sealed) == ("t", (5,), b"dd")
