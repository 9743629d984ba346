"""Meanings of each refusal of a Redis that answers, by the words that servers use."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator

import pytest
import structlog
from redis._parsers.base import BaseParser

from baton.base.errors import BatonError, ErrorKind
from baton.state.client.connection import translate
from baton.state.state import State
from baton.state.stores.key_names import LEASE_S
from tests.state.contract import member
from tests.state.raw import raw
from tests.state.test_quotas import Router
from tests.support.waiting import until

# Replies of Redis 6 to 8 and Valkey 7 to 9; a script of Redis 6 has that of its command within its own.
OUTAGES = [
    "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    "MISCONF Errors writing to the AOF file: No space left on device",
    "NOREPLICAS Not enough good replicas to write.",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "LOADING Redis is loading the dataset in memory",
    "READONLY You can't write against a read only replica.",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "CLUSTERDOWN The cluster is down",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "ERR max number of clients reached",
    "ERR Error running script (call to f_ab): @user_script:3: @user_script: 3: -MISCONF Redis is configured",
    "ERR Error running script (call to f_ab): @user_script:3: OOM command not allowed when used memory",
]
CREDENTIALS = [
    "NOAUTH Authentication required.",
    "WRONGPASS invalid username-password pair or user is disabled.",
    "NOPERM User default has no permissions to run the 'evalsha' command",
    "ERR invalid password",
]
COMMANDS = [
    "ERR unknown command 'EVALSHA'",
    "WRONGTYPE Operation against a key holding the wrong kind of value",
    "ERR value is not an integer or out of range",
    "NOPROTO unsupported protocol version",
]
KINDS = {
    **dict.fromkeys(OUTAGES, ErrorKind.UNAVAILABLE),
    **dict.fromkeys(CREDENTIALS, ErrorKind.UNAUTHENTICATED),
    **dict.fromkeys(COMMANDS, ErrorKind.INTERNAL),
}


@pytest.mark.parametrize("reply", KINDS)
def test_each_reply_has_its_meaning_and_its_text_is_not_repeated(reply: str) -> None:
    error = BaseParser.parse_error(reply)  # type: ignore[no-untyped-call]
    failure = translate(error, "there:1")
    assert failure.kind is KINDS[reply]
    assert "there:1" in failure.message
    assert "user_script" not in failure.message


class Refusing:
    """A server that answers each command but those of the handshake with an error, until `reply` is None."""

    def __init__(self, reply: str) -> None:
        self.reply: str | None = reply
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                words = []
                for _ in range(int((await reader.readuntil(b"\r\n"))[1:])):
                    size = int((await reader.readuntil(b"\r\n"))[1:])
                    words.append((await reader.readexactly(size + 2))[:-2].upper())
                handshake = words[0] in (b"HELLO", b"CLIENT", b"SELECT")
                if self.reply is None or handshake:
                    writer.write(b"+PONG\r\n" if words[0] == b"PING" else b"+OK\r\n")
                else:
                    writer.write(f"-{self.reply}\r\n".encode())
        writer.close()


@contextlib.asynccontextmanager
async def refusing(reply: str) -> AsyncIterator[Refusing]:
    found = Refusing(reply)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    async with server:
        yield found


@pytest.mark.parametrize("reply", [*OUTAGES[:8], CREDENTIALS[0], COMMANDS[0]])
async def test_a_refusing_server_is_seen_and_no_worker_ends_for_what_may_end(reply: str) -> None:
    """An outage begins and ends with one line each; only refused credentials end a worker's first start."""
    async with refusing(reply) as server:
        with structlog.testing.capture_logs() as logged:
            state = State.at(server.url, namespace="ns")
            ends = asyncio.create_task(state.refusal())
            for _ in range(3):
                with pytest.raises(BatonError) as failed:
                    await state.check()
                assert failed.value.kind is KINDS[reply]
            assert state.unavailable is (KINDS[reply] is not ErrorKind.INTERNAL)
            assert ends.done() is (KINDS[reply] is ErrorKind.UNAUTHENTICATED)
            server.reply = None
            await until(lambda: _answers(state), 5)
            assert not state.unavailable
            ends.cancel()
            await state.close(0.5)
    events = [line["event"] for line in logged if str(line["event"]).startswith("redis_")]
    outage = ["redis_unavailable", "redis_available"]
    assert events == (["redis_command_refused"] if KINDS[reply] is ErrorKind.INTERNAL else outage)


async def _answers(state: State) -> bool:
    try:
        await state.check()
    except BatonError:
        return False
    return True


@pytest.fixture(params=["redis", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


async def test_a_clock_that_went_back_locks_no_tenant_out(url: str) -> None:
    """The clock went back by an hour: what was left is left, and a router that has ended holds nothing."""
    namespace = uuid.uuid4().hex
    state = State.at(url, namespace=namespace)
    one, gone = Router(state.quotas, "one"), Router(state.quotas, "gone")
    await gone.rebalance(60_000)
    await one.rebalance()
    async with raw(url) as client:
        later = 1000 * ((await client.time())[0] + 3600)
        async for key in client.scan_iter(f"*{namespace}*"):
            if await client.type(key) == b"hash":
                await client.hset(key, "at", later)
            else:
                await client.zadd(key, {"gone": later})
    await one.rebalance(60_000)
    assert one.routers == 1
    assert one.holds > 50_000
    await state.close()


async def test_a_clock_that_went_back_keeps_no_dead_worker_listed(url: str) -> None:
    namespace = uuid.uuid4().hex
    state = State.at(url, namespace=namespace)
    await state.registry.announce(member(), 0, LEASE_S)
    assert len((await state.registry.listing()).entries) == 1
    async with raw(url) as client:
        later = 1000 * ((await client.time())[0] + 3600)
        async for key in client.scan_iter(f"*{namespace}*"):
            if await client.type(key) == b"zset":
                await client.zadd(key, {member().name: later})
    assert (await state.registry.listing()).entries == ()
    assert await state.registry.keeper(member().name) is None
    await state.registry.announce(member(), 0, LEASE_S)
    assert len((await state.registry.listing()).entries) == 1
    await state.close()
