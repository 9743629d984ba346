"""The journal's writer: never in the way, bounded, and nothing readable in Redis."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator

import pytest
import structlog

from baton.base.errors import BatonError, ErrorKind
from baton.state import JournalRecord, State, new_journal_key
from baton.state.journal import MAX_PENDING, Receipt
from tests.state.contract import member
from tests.state.journal_reader import ReadableSeal, open_ids, read_journal
from tests.state.memory import Memory, memory_state
from tests.state.opened import open_state
from tests.state.raw import raw

TOKENS = tuple(range(1_000_000, 1_000_400))
TENANT = "tenant-in-clear"


def record(number: int = 0) -> JournalRecord:
    return JournalRecord(number.to_bytes(16, "big"), TENANT, TOKENS)


@pytest.fixture
async def memory() -> Memory:
    return Memory()


@pytest.fixture
async def state(memory: Memory) -> AsyncIterator[State]:
    state = memory_state(memory)
    yield state
    await state.close(0.1)


async def test_what_ended_before_it_was_written_is_never_written(state: State, memory: Memory) -> None:
    state.journal.append(record(), 60)
    state.journal.close(record().request_id)
    assert state.journal.pending == 0
    assert await state.journal.flush(1)
    assert memory.journal == {}


async def test_an_outage_is_waited_out(state: State, memory: Memory) -> None:
    memory.unavailable = True
    kept, ended, brief = (state.journal.append(record(number), ttl_s) for number, ttl_s in _THREE)
    assert not await state.journal.flush(0.2)
    state.journal.mark_attempt(record(0).request_id, 2)
    state.journal.close(record(1).request_id)
    memory.unavailable = False
    assert await state.journal.flush(3)
    assert await open_ids(state) == [record(0).request_id]
    assert (kept, ended.dropped, brief) == (Receipt(acknowledged=True), False, Receipt(dropped=True))
    assert state.counters.journal_dropped == 1
    found = await read_journal(state.journal, record(0).request_id)
    assert found is not None
    assert found.attempt == 2


_THREE = ((0, 60.0), (1, 60.0), (2, 0.1))


async def test_pending_entries_are_bounded_and_drops_are_counted(state: State, memory: Memory) -> None:
    memory.unavailable = True
    receipts = [state.journal.append(record(number), 60) for number in range(MAX_PENDING)]
    assert state.journal.pending == MAX_PENDING // 2
    assert state.counters.journal_dropped == MAX_PENDING // 2
    assert [receipt.dropped for receipt in receipts] == [False] * (MAX_PENDING // 2) + [True] * (
        MAX_PENDING // 2
    )
    for number in range(MAX_PENDING, 3 * MAX_PENDING):
        state.journal.close(record(number).request_id)
    assert state.journal.pending == MAX_PENDING
    memory.unavailable = False
    assert await state.journal.flush(5)
    assert await state.journal.count_open() == MAX_PENDING // 2


async def test_changes_that_find_no_place_are_logged_as_such(state: State, memory: Memory) -> None:
    with structlog.testing.capture_logs() as logged:
        memory.unavailable = True
        for number in range(MAX_PENDING + 3):
            state.journal.mark_attempt(record(number).request_id, 2)
        memory.unavailable = False
        assert await state.journal.flush(5.0)
    lines = [line for line in logged if line["event"] == "journal_entries_dropped"]
    assert [line["full"] for line in lines] == [3]


async def test_no_entry_is_dropped_without_a_line(state: State, memory: Memory) -> None:
    """Entries that find no place, and those whose deadlines pass first, are logged in as many lines as
    batches."""
    with structlog.testing.capture_logs() as logged:
        memory.unavailable = True
        for number in range(MAX_PENDING // 2 + 3):
            state.journal.append(record(number), 60.0 if number else 0.02)
        await asyncio.sleep(0.05)
        memory.unavailable = False
        assert await state.journal.flush(5.0)
    lines = [line for line in logged if line["event"] == "journal_entries_dropped"]
    assert [sum(line.get(why, 0) for line in lines) for why in ("full", "expired")] == [3, 1]
    assert state.counters.journal_dropped == 4
    assert len(lines) <= 3


async def test_redis_holds_neither_tokens_nor_tenants_in_clear(redis_url: str) -> None:
    key = new_journal_key()
    writer = await open_state(redis_url, namespace="sealed", journal_key=key)
    reader = await open_state(redis_url, namespace="sealed", journal_key=key)
    writer.journal.append(record(), 60)
    assert await writer.journal.flush(5)
    values = await _everything(redis_url, "sealed")
    assert values
    for size in "IHQ":
        for order in "<>":
            for at in range(0, len(TOKENS) - 2, 2):
                part = [token % 2**16 if size == "H" else token for token in TOKENS[at : at + 2]]
                assert not any(struct.pack(f"{order}2{size}", *part) in value for value in values)
    for text in (TENANT, *(str(token) for token in TOKENS[:50])):
        assert not any(text.encode() in value for value in values)
    assert await read_journal(reader.journal, record().request_id) == record()
    writer.journal.close(record().request_id)
    await writer.close()
    await reader.close()
    assert await _everything(redis_url, "sealed") == []


async def _everything(url: str, namespace: str) -> list[bytes]:
    """Every value under `namespace`, keys and fields included."""
    found: list[bytes] = []
    async with raw(url) as client:
        async for key in client.scan_iter(f"{{{namespace}.*"):
            found.append(key)
            if await client.type(key) == b"hash":
                found += [piece for pair in (await client.hgetall(key)).items() for piece in pair]
            else:
                found += await client.zrange(key, 0, -1)
    return found


async def test_every_key_ends_by_itself(redis_url: str) -> None:
    """Keys that are left in Redis when all processes are gone do not stay for ever."""
    state = await open_state(redis_url, namespace="ends")
    await state.registry.announce(member(), 0, 1.0)
    await state.prefix_index.apply("0" * 32, [b"x" * 32], [], fresh=True)
    state.journal.append(record(), 60)
    assert await state.journal.flush(5)
    async with raw(redis_url) as client:
        keys = [key async for key in client.scan_iter("{ends.*")]
        assert len(keys) == 6
        for key in keys:
            assert 0 < await client.ttl(key) <= 24 * 3600
    await state.close()


def test_a_sealed_entry_is_of_its_request_cluster_and_key() -> None:
    key, one, two = new_journal_key(), os.urandom(16), os.urandom(16)
    sealed = ReadableSeal(key, "ours").seal(one, TENANT, TOKENS)
    assert ReadableSeal(key, "ours").unseal(one, sealed) == (TENANT, TOKENS, b"")
    assert ReadableSeal(key, "ours").seal(one, TENANT, TOKENS) != sealed
    broken = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for seal, request_id, body in (
        (ReadableSeal(key, "ours"), two, sealed),
        (ReadableSeal(key, "theirs"), one, sealed),
        (ReadableSeal(new_journal_key(), "ours"), one, sealed),
        (ReadableSeal(key, "ours"), one, broken),
        (ReadableSeal(key, "ours"), one, b"\x02" + sealed[1:]),
        (ReadableSeal(key, "ours"), one, b""),
    ):
        with pytest.raises(BatonError) as refused:
            seal.unseal(request_id, body)
        assert refused.value.kind is ErrorKind.INTERNAL
