"""A worker in the registry: it registers, drains, leaves, and learns when it is excluded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import cast

import pytest

from baton.base.errors import BatonError, ErrorKind, NameTakenError
from baton.state.embedded import EmbeddedServer
from baton.v1.engine_pb2 import PrefixesEvent
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import DescribeResponse, Load
from services.common.config.state import StateConfig
from services.common.config.worker import WorkerConfig
from services.worker.front.registration import Registration
from services.worker.front.worker_servicer import WorkerServicer
from tests.state.contract import member
from tests.state.opened import open_state
from tests.support.waiting import until


class Served:
    """A servicer with a fixed load."""

    def __init__(self) -> None:
        self.load = Load(slots=16, free_slots=16, blocks=100, free_blocks=99, block_tokens=16)
        self._identity = WorkerIdentity(name="decode-0", incarnation=os.urandom(16))

    def describe(self) -> DescribeResponse:
        return DescribeResponse(
            identity=self._identity,
            fingerprint=b"\xab",
            max_context_tokens=512,
            vocab_size=99,
            load=self.load,
        )


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    started = await EmbeddedServer.start()
    yield started
    await started.stop()


def registration(url: str, restarts: int = 0) -> Registration:
    config = WorkerConfig(name="decode-0", role="decode", model="/m", restarts=restarts)
    return Registration(config, StateConfig(redis_url=url, namespace="ours", cluster_id="abcd"))


def enter(worker: Registration, served: Served) -> None:
    worker.register(
        "a-model", cast(WorkerServicer, served), {"grpc": "h:1", "transfer": "", "metrics": "h:2"}
    )


async def test_an_entry_from_registration_to_removal(server: EmbeddedServer) -> None:
    reader = await open_state(server.url, namespace="ours")
    worker, served = registration(server.url), Served()
    assert not worker.registered
    enter(worker, served)
    await until(lambda: worker.registered)
    (entry,) = (await reader.registry.listing()).entries
    member = entry.member
    assert (member.name, member.role, member.model) == ("abcd.decode-0", "decode", "a-model")
    assert member.addresses == {"grpc": "h:1", "metrics": "h:2"}
    assert (member.fingerprint, member.limits["slots"], member.limits["vocab_size"]) == ("ab", 16, 99)
    worker.drain()

    async def draining() -> bool:
        return [one.member.draining for one in (await reader.registry.listing()).entries] == [True]

    await until(draining)
    await worker.close()
    assert (await reader.registry.listing()).entries == ()
    await reader.close()


async def test_cached_blocks_are_in_the_index_until_the_worker_ends(server: EmbeddedServer) -> None:
    reader = await open_state(server.url, namespace="ours")
    worker, served = registration(server.url), Served()
    enter(worker, served)
    me = served.describe().identity.incarnation
    one, two, three = (bytes([number]) * 16 for number in range(3))

    async def known() -> int:
        return (await reader.prefix_index.longest_prefix([one, two, three], [me.hex()])).get(me.hex(), 0)

    async def becomes(count: int) -> None:
        async with asyncio.timeout(5):
            while await known() != count:  # noqa: ASYNC110 (Redis sends no notification)
                await asyncio.sleep(0.02)

    worker.publish_prefixes(me, PrefixesEvent(added=[one, two, three]))
    await becomes(3)
    worker.publish_prefixes(me, PrefixesEvent(removed=[two]))
    await becomes(1)
    worker.publish_prefixes(me, PrefixesEvent(added=[two], removed=[three]))
    await becomes(2)
    await worker.close()
    assert await known() == 0
    await reader.close()


async def test_a_replaced_worker_is_excluded(server: EmbeddedServer) -> None:
    old, new = registration(server.url, restarts=2), registration(server.url)
    enter(old, Served())
    await until(lambda: old.registered)
    enter(new, Served())
    error = await asyncio.wait_for(old.excluded(), 5)
    assert error.kind is ErrorKind.CONFLICT
    assert new.registered
    for worker in (old, new):
        await worker.close()


async def test_the_replaced_worker_does_not_take_its_name_back(server: EmbeddedServer) -> None:
    """The replaced worker's next start ends before it serves; one after the end of the worker that has the
    name does not."""
    old, new = registration(server.url, restarts=2), registration(server.url)
    enter(old, Served())
    await until(lambda: old.registered)
    enter(new, Served())
    first = await asyncio.wait_for(old.excluded(), 5)
    again = registration(server.url, restarts=3)
    second = await asyncio.wait_for(again.excluded(), 5)
    for error, kept in ((first, False), (second, True)):
        assert isinstance(error, NameTakenError)
        assert (error.name, error.address, error.kept) == ("abcd.decode-0", "h:1", kept)
    assert not await again.may_have_name()
    assert new.registered
    await new.close()
    assert await again.may_have_name()
    last = registration(server.url, restarts=4)
    enter(last, Served())
    await until(lambda: last.registered)
    for worker in (old, again, last):
        await worker.close()


async def test_a_name_that_a_dead_worker_keeps_is_taken_once_its_lease_ends(server: EmbeddedServer) -> None:
    """The worker looks for the name as it starts, or only asks for it once it serves."""
    reader = await open_state(server.url, namespace="ours")
    old, dead = member("abcd.decode-0"), member("abcd.decode-0")
    generation = await reader.registry.announce(old, 0, 60)
    kept = await reader.registry.announce(dead, 0, 60)
    with pytest.raises(NameTakenError):
        await reader.registry.announce(old, generation, 60)
    await reader.registry.announce(dead, kept, 1.5)
    looks, asks = registration(server.url), registration(server.url)
    excluded = asyncio.create_task(looks.excluded())
    enter(asks, Served())
    await until(lambda: asks.registered, 5)
    assert not excluded.done()
    excluded.cancel()
    for worker in (looks, asks):
        await worker.close()
    await reader.close()


async def test_a_refused_password_ends_a_first_start_and_no_later_one(server: EmbeddedServer) -> None:
    url = server.url.replace(server.password, "not-the-password")
    first, later = registration(url), registration(url, restarts=1)
    error = await asyncio.wait_for(first.excluded(), 5)
    assert error.kind is ErrorKind.UNAUTHENTICATED
    assert "not-the-password" not in error.message
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(later.excluded(), 1)
    for worker in (first, later):
        await worker.close()


async def test_an_unavailable_redis_delays_neither_start_nor_end() -> None:
    worker = registration("redis://127.0.0.1:1")
    enter(worker, Served())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.excluded(), 1)
    assert not worker.registered
    assert worker.state.unavailable
    async with asyncio.timeout(3):
        await worker.close()


async def test_a_wrong_url_is_refused() -> None:
    with pytest.raises(BatonError, match="the URL of Redis"):
        registration("http://h")
