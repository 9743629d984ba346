"""Stored responses: in Redis, on every kind of it, and in the memory of other tests."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.state.embedded import EmbeddedServer
from baton.state.stores.key_names import Keys
from baton.state.stores.protocols import ResponseStore
from baton.state.stores.response_seal import ResponseSeal
from baton.state.stores.seal import new_journal_key
from tests.state.memory_responses import MemoryResponses
from tests.state.opened import open_state
from tests.state.raw import raw

LONG_S = 60.0
MOST = 1 << 20


@pytest.fixture(params=["memory", "redis", "cluster", "sentinel"])
def url(request: pytest.FixtureRequest) -> str | None:
    """The URL of the store; None in memory."""
    if request.param == "memory":
        return None
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture
async def store(url: str | None) -> AsyncIterator[ResponseStore]:
    if url is None:
        yield MemoryResponses(time.monotonic)
        return
    state = await open_state(url, namespace=uuid.uuid4().hex)
    yield state.responses
    await state.close()


async def test_a_record_belongs_to_its_tenant(store: ResponseStore) -> None:
    await store.put("acme", "resp_1", b"one", LONG_S, MOST)
    await store.put("", "resp_1", b"of no tenant", LONG_S, MOST)
    assert await store.get("acme", "resp_1") == b"one"
    assert await store.get("", "resp_1") == b"of no tenant"
    assert await store.get("other", "resp_1") is None
    assert not await store.delete("other", "resp_1")
    assert await store.delete("acme", "resp_1")
    assert await store.get("acme", "resp_1") is None
    assert not await store.delete("acme", "resp_1")
    assert await store.get("", "resp_1") == b"of no tenant"


async def test_a_late_write_brings_no_deleted_record_back(store: ResponseStore) -> None:
    """A router tries a write again that had been done, while another one deletes the record."""
    await store.put("acme", "resp_1", b"one", LONG_S, MOST)
    assert await store.delete("acme", "resp_1")
    await store.put("acme", "resp_1", b"one", LONG_S, MOST)
    assert await store.get("acme", "resp_1") is None
    assert not await store.delete("acme", "resp_1")
    await store.put("acme", "resp_2", b"a" * 600, LONG_S, MOST)
    assert await store.get("acme", "resp_2") == b"a" * 600


async def test_a_record_may_be_written_again(store: ResponseStore) -> None:
    """The second write follows an answer that was lost on its way."""
    for record in (b"a" * 600, b"b" * 600, b"c" * 600):
        await store.put("acme", "resp_1", record, LONG_S, 1500)
    await store.put("acme", "resp_2", b"d" * 600, LONG_S, 1500)
    assert await store.get("acme", "resp_1") == b"c" * 600
    assert await store.get("acme", "resp_2") == b"d" * 600


async def test_a_record_expires(store: ResponseStore) -> None:
    await store.put("acme", "resp_1", b"a", 0.2, MOST)
    await store.put("acme", "resp_2", b"b", LONG_S, MOST)
    await asyncio.sleep(0.4)
    assert await store.get("acme", "resp_1") is None
    assert not await store.delete("acme", "resp_1")
    assert await store.get("acme", "resp_2") == b"b"


async def test_a_tenants_oldest_make_room(store: ResponseStore) -> None:
    """Each has 600 bytes and what sealing adds; 2,000 bytes have room for three. Another tenant's stay."""
    await store.put("other", "resp_0", b"o" * 600, LONG_S, 2000)
    for number in range(5):
        await store.put("acme", f"resp_{number}", b"%d" % number * 600, LONG_S + number, 2000)
    found = [await store.get("acme", f"resp_{number}") is not None for number in range(5)]
    assert found == [False, False, True, True, True]
    await store.delete("acme", "resp_3")
    await store.put("acme", "resp_5", b"5" * 600, LONG_S + 5, 2000)
    assert await store.get("acme", "resp_2") is not None
    assert await store.get("other", "resp_0") is not None
    await store.put("acme", "resp_6", b"6" * 5000, LONG_S + 6, 2000)
    found = [await store.get("acme", f"resp_{number}") is not None for number in range(7)]
    assert found == [False] * 6 + [True]


async def test_nothing_is_left_of_what_is_gone(redis_url: str) -> None:
    """Neither in the index nor in the sizes, and no content in plaintext."""
    namespace = uuid.uuid4().hex
    state = await open_state(redis_url, namespace=namespace)
    try:
        await state.responses.put("acme", "resp_1", b"a canary" * 9, 0.2, MOST)
        await state.responses.put("acme", "resp_2", b"b", LONG_S, MOST)
        index, sizes, record = Keys(namespace).responses("acme", "resp_1")
        async with raw(redis_url) as client:
            assert b"canary" not in await client.execute_command("GET", record)
            await asyncio.sleep(0.4)
            await state.responses.put("acme", "resp_3", b"c", LONG_S, MOST)
            await state.responses.delete("acme", "resp_2")
            assert await client.execute_command("ZRANGE", index, 0, -1) == [b"resp_3"]
            left = await client.execute_command("HGETALL", sizes)
            assert left == {b"resp_3": b"30", b"total": b"30"}
            assert 0 < await client.execute_command("PTTL", index) <= LONG_S * 1000
            await state.responses.delete("acme", "resp_3")
            assert await client.execute_command("EXISTS", index) == 0
    finally:
        await state.close()


async def fill(store: ResponseStore) -> None:
    """Fills the store with 20 MiB."""
    for number in range(20):
        await store.put("acme", f"resp_{number}", b"x" * (1 << 20), LONG_S, 1 << 30)


async def test_a_fifth_of_the_memory_stays_for_the_rest() -> None:
    """Registry and journal are written where no response is taken any more."""
    server = await EmbeddedServer.start()
    state = await open_state(server.url)
    try:
        async with raw(server.url) as client:
            await client.execute_command("CONFIG", "SET", "maxmemory", 12 << 20)
            with pytest.raises(BatonError) as full:
                await fill(state.responses)
            assert full.value.kind is ErrorKind.UNAVAILABLE
            assert await state.responses.get("acme", "resp_0") is not None
            await client.execute_command("SET", "other", "x" * (1 << 20))
    finally:
        await state.close()
        await server.stop()


def test_a_record_moved_elsewhere_is_not_read() -> None:
    key = new_journal_key()
    seal = ResponseSeal(key, "ours")
    sealed = seal.seal("acme", "resp_1", b"text")
    assert seal.open("acme", "resp_1", sealed) == b"text"
    assert seal.open("acme", "resp_2", sealed) is None
    assert seal.open("other", "resp_1", sealed) is None
    assert ResponseSeal(key, "theirs").open("acme", "resp_1", sealed) is None
    assert ResponseSeal(new_journal_key(), "ours").open("acme", "resp_1", sealed) is None
    assert seal.open("acme", "resp_1", sealed[:20]) is None
    assert seal.open("acme", "resp_1", b"") is None
