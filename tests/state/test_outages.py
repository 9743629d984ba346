"""Outages of a real Redis: stopped, killed, wiped, slow; everything recovers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.state import JournalRecord, State, View, new_incarnation
from baton.state.client.connection import CALL_S
from baton.state.embedded import EmbeddedServer
from baton.state.stores.key_names import LEASE_S, POLL_S, Keys
from tests.state.contract import member
from tests.state.memory import memory_state
from tests.state.opened import open_state
from tests.state.raw import raw
from tests.support.waiting import until

BACK_S = 3.0
# How long the machine itself may stand still while a deadline passes.
STALL_S = 5.0
NAMES = {f"decode-{number}" for number in range(4)}


async def is_whole(reader: State) -> bool:
    """True if the registry in Redis has every member."""
    try:
        entries = (await reader.registry.listing()).entries
    except BatonError:
        return False
    return {entry.member.name for entry in entries} == NAMES


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Users:
    """Workers in one `State`, a router in another, as two processes would be."""

    def __init__(self, workers: State, router: State) -> None:
        self.workers, self.router = workers, router
        self.leases = [workers.lease(member(name)) for name in sorted(NAMES)]
        self.seen: list[set[str]] = []
        self.view: View = router.watch(lambda: self.seen.append(set(self.view.members)))
        self.publisher = workers.publish_prefixes(self.leases[0].member.incarnation)
        self.publisher.add([b"a" * 32, b"b" * 32])

    @classmethod
    @asynccontextmanager
    async def met(cls, url: str) -> AsyncIterator[Users]:
        """Two members that know each other; they leave at the end, where the test has not stopped them."""
        async with AsyncExitStack() as stack:
            both = [await open_state(url), await open_state(url)]
            for state in both:
                stack.push_async_callback(state.close)
            users = cls(*both)
            await until(lambda: set(users.view.members) == NAMES, 5)
            yield users

    async def prefix_is_whole(self) -> bool:
        holder = self.leases[0].member.incarnation
        found = await self.router.prefix_index.longest_prefix([b"a" * 32, b"b" * 32], [holder])
        return found == {holder: 2}


async def started(
    stack: AsyncExitStack, *, port: int | None = None, password: str | None = None
) -> EmbeddedServer:
    server = await EmbeddedServer.start(port=port, password=password)
    stack.push_async_callback(server.stop)
    return server


@pytest.mark.parametrize(
    ("away_s", "fault"),
    [
        pytest.param(LEASE_S + 1.0, "stop", marks=pytest.mark.slow),
        (1.0, "wipe"),
        pytest.param(30.0, "stop", marks=pytest.mark.slow),
        pytest.param(30.0, "wipe", marks=pytest.mark.slow),
    ],
)
async def test_everything_recovers_and_no_member_was_removed(away_s: float, fault: str) -> None:
    before = descriptors()
    async with AsyncExitStack() as stack:
        server = await started(stack)
        users = await stack.enter_async_context(Users.met(server.url))
        users.seen.clear()
        if fault == "stop":
            os.kill(server.pid, signal.SIGSTOP)
        else:
            server.kill()
            await server.wait()
        begin = asyncio.get_running_loop().time()
        await _all_end_in_time(users)
        receipt = users.router.journal.append(JournalRecord(b"r" * 16, "t", (1, 2, 3)), 60)
        await asyncio.sleep(max(0.0, begin + away_s - asyncio.get_running_loop().time()))
        assert set(users.view.members) == NAMES
        assert users.router.unavailable
        assert users.workers.unavailable
        assert not any(lease.registered.is_set() for lease in users.leases)
        if fault == "stop":
            os.kill(server.pid, signal.SIGCONT)
        else:
            server = await started(stack, port=server.port, password=server.password)
        await until(lambda: is_whole(users.router), BACK_S)
        await until(lambda: receipt.acknowledged, BACK_S)
        await asyncio.sleep(LEASE_S + 2 * POLL_S if fault == "wipe" and away_s < 2 else 0)  # past the grace
        assert set(users.view.members) == NAMES
        assert users.seen == []
        await until(users.prefix_is_whole, 8)
        assert (users.router.counters.outages, users.workers.counters.outages) == (1, 1)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await asyncio.sleep(0.05)
    assert descriptors() <= before


async def _all_end_in_time(users: Users) -> None:
    """Many calls at once, while Redis is away: each ends with a clear error by its deadline."""
    calls = [users.router.registry.listing() for _ in range(100)]
    async with asyncio.timeout(CALL_S + STALL_S):
        ended = await asyncio.gather(*calls, return_exceptions=True)
    assert len(ended) == 100
    assert all(isinstance(one, BatonError) and one.kind is ErrorKind.UNAVAILABLE for one in ended)


async def test_a_dead_workers_lease_lapses_and_a_newer_start_takes_over(redis_url: str) -> None:
    worker, router = [await open_state(redis_url, namespace="lapse") for _ in range(2)]
    view = router.watch()
    old = worker.lease(member("decode-0"))
    await until(lambda: view.members.get("decode-0") == old.member, 5)
    newer = await open_state(redis_url, namespace="lapse")
    new = newer.lease(member("decode-0"))
    await until(lambda: view.members.get("decode-0") == new.member, 5)
    await asyncio.wait_for(old.replaced.wait(), 5)
    new.update(new.member.model_copy(update={"draining": True}))
    await until(lambda: view.members["decode-0"].draining, 5)
    # A clean leave is seen at the next poll, not after the lease.
    await newer.close()
    await until(lambda: not view.members, 2 + 2 * POLL_S + LEASE_S)
    await worker.close()
    await router.close()


async def test_closing_while_redis_is_silent_takes_no_longer_than_it_may() -> None:
    async with AsyncExitStack() as stack:
        server = await started(stack)
        users = await stack.enter_async_context(Users.met(server.url))
        os.kill(server.pid, signal.SIGSTOP)
        users.router.journal.append(JournalRecord(b"r" * 16, "t", (1,)), 60)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(2 + STALL_S):
            await asyncio.gather(users.workers.close(1.0), users.router.close(1.0))
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_malformed_members_are_skipped(redis_url: str) -> None:
    state = await open_state(redis_url, namespace="rubbish")
    one = member("good")
    await state.registry.announce(one, 0, 60)
    _, members, leases, _ = Keys("rubbish").registry
    rubbish = [
        b"",
        b"x",
        b"\xff\xfe",
        b"00:1:{}",
        b"0" * 32 + b":1:{",
        new_incarnation().encode() + b":1:null",
    ]
    async with raw(redis_url) as client:
        now_s, _ = await client.time()
        for number, text in enumerate(rubbish):
            await client.hset(members, f"bad-{number}", text)
            await client.zadd(leases, {f"bad-{number}": 1000 * (now_s + 60)})
    assert [entry.member for entry in (await state.registry.listing()).entries] == [one]
    assert state.counters.malformed == len(rubbish)
    await state.close()


async def test_a_callback_that_fails_does_not_end_the_view() -> None:
    state = memory_state()

    def broken() -> None:
        raise RuntimeError("a fault of the caller's")

    view, first = state.watch(broken), state.lease(member("decode-0"))
    await until(lambda: state.counters.tasks_failed == 1, 10)
    state.lease(member("decode-1"))
    await until(lambda: set(view.members) == {"decode-0", "decode-1"}, 10)
    assert first.registered.is_set()
    await state.close()
