"""The connection to Redis: no answer reaches another caller, and no call exceeds its deadline."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.state.client.connect import MAX_CONNECTIONS, parse_url
from baton.state.client.connection import MAX_CALLS, Connection
from baton.state.client.counters import Counters
from tests.state.proxy import Proxy, proxy, seeded_delays
from tests.state.raw import raw
from tests.support.waiting import until

_ECHO = "return ARGV[1]"


@asynccontextmanager
async def behind_a_proxy(url: str, call_s: float = 2.0) -> AsyncIterator[tuple[Connection, Proxy, Counters]]:
    counters = Counters()
    port = urlsplit(url).port
    assert port is not None
    async with proxy(port) as between:
        endpoint = parse_url(url.replace(f":{port}", f":{between.port}"))
        connection = Connection(endpoint, counters, call_s)
        await _announce(url, between.port)
        try:
            yield connection, between, counters
        finally:
            between.delay_s = lambda: 0.0
            await connection.close(1.0)
            await _announce(url, port)


async def _announce(url: str, port: int) -> None:
    """Has a cluster's node send its clients to `port`, where the proxy is."""
    if "+cluster" in url:
        async with raw(url) as client:
            await client.config_set("cluster-announce-port", port)


async def _ask(connection: Connection, number: int) -> str:
    """Asks for an answer that no other caller may get; "right", or reason there was none."""
    nonce = b"nonce %d" % number
    try:
        answer = await connection.script(_ECHO, ["{k}"], [nonce])
    except BatonError as error:
        return error.kind.name
    assert answer == nonce
    return "right"


async def _impatient(connection: Connection, number: int, patience_s: float | None) -> str:
    try:
        async with asyncio.timeout(patience_s):
            return await _ask(connection, number)
    except TimeoutError:
        return "gave up"


@pytest.mark.parametrize(
    ("call_s", "calls"), [(2.0, 320), (0.12, 320), pytest.param(0.12, 20_000, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ["redis", "cluster"])
def test_callers_that_give_up_leave_no_answer_behind(
    request: pytest.FixtureRequest, kind: str, call_s: float, calls: int
) -> None:
    asyncio.run(_give_up(request.getfixturevalue(f"{kind}_url"), call_s, calls))


async def _give_up(redis_url: str, call_s: float, calls: int) -> None:
    """Cancels nine of ten callers at random times; with a short `call_s` the connection ends calls as
    well."""
    draw = random.Random(7)
    async with behind_a_proxy(redis_url, call_s) as (connection, between, counters):
        between.delay_s = seeded_delays(1)
        outcomes: list[str] = []
        for begin in range(0, calls, 40):
            patience = [draw.uniform(0, 0.15) if number % 10 else None for number in range(40)]
            asked = [_impatient(connection, begin + number, each) for number, each in enumerate(patience)]
            outcomes += await asyncio.gather(*asked)
        between.delay_s = lambda: 0.0
        # The fault took effect, and yet no caller read another's answer (`_ask` compares).
        assert outcomes.count("gave up") > calls / 10
        assert (counters.clients_dropped > 0) == (call_s < 1)
        assert call_s < 1 or outcomes.count("right") > calls / 40
        await until(lambda: _is_right(connection, calls), 10)


async def _is_right(connection: Connection, number: int) -> bool:
    return await _ask(connection, number) == "right"


async def test_connections_are_bounded_and_turns_are_taken(redis_url: str) -> None:
    async with behind_a_proxy(redis_url) as (connection, between, _):
        between.delay_s = lambda: 0.005
        assert set(await asyncio.gather(*(_ask(connection, number) for number in range(200)))) == {"right"}
        assert 1 <= between.connections <= MAX_CONNECTIONS


async def test_too_many_calls_are_refused_at_once(redis_url: str) -> None:
    async with behind_a_proxy(redis_url, call_s=0.5) as (connection, between, _):
        between.piece = 0
        begin = asyncio.get_running_loop().time()
        outcomes = await asyncio.gather(*(_ask(connection, number) for number in range(MAX_CALLS + 10)))
        assert set(outcomes) == {"UNAVAILABLE"}
        assert asyncio.get_running_loop().time() - begin < 3
        between.piece = None
        assert await _ask(connection, 1) == "right"


@pytest.mark.parametrize("piece", [0, 1])
async def test_a_silent_or_dripping_server_ends_no_later_than_the_deadline(
    redis_url: str, piece: int
) -> None:
    async with behind_a_proxy(redis_url, call_s=0.4) as (connection, between, counters):
        assert await _ask(connection, 0) == "right"
        between.delay_s = lambda: 0.2
        between.piece = piece
        async with asyncio.timeout(2):
            assert await _ask(connection, 1) == "UNAVAILABLE"
        assert counters.clients_dropped == 1
        assert connection.down_s is not None
        between.delay_s, between.piece = lambda: 0.0, None
        # It was one outage, however many more calls end by their deadlines on a busy machine.
        await until(lambda: _is_right(connection, 2), 10)
        assert connection.down_s is None
        assert counters.outages == 1


async def test_a_connection_that_was_cut_is_replaced_unseen(redis_url: str) -> None:
    async with behind_a_proxy(redis_url) as (connection, between, counters):
        assert await _ask(connection, 0) == "right"
        between.cut()
        await asyncio.sleep(0.05)
        assert await _ask(connection, 1) == "right"
        assert (counters.calls_failed, between.connections) == (0, 2)


async def test_a_server_that_forgot_its_scripts_learns_them_again(redis_url: str) -> None:
    async with behind_a_proxy(redis_url) as (connection, _, counters):
        assert await _ask(connection, 0) == "right"
        async with raw(redis_url) as client:
            await client.script_flush()
        assert await _ask(connection, 1) == "right"
        assert counters.calls_failed == 0


async def test_a_refused_command_is_no_outage(redis_url: str) -> None:
    async with behind_a_proxy(redis_url) as (connection, _, counters):
        with pytest.raises(BatonError) as refused:
            await connection.script("return redis.call('GET')", ["{k}"])
        assert refused.value.kind is ErrorKind.INTERNAL
        assert (counters.outages, connection.down_s) == (0, None)


async def test_closing_ends_what_still_runs(redis_url: str) -> None:
    async with behind_a_proxy(redis_url) as (connection, between, _):
        between.piece = 0
        asked = [asyncio.create_task(_ask(connection, number)) for number in range(40)]
        await asyncio.sleep(0.05)
        late = asyncio.create_task(_ask(connection, 40))
        async with asyncio.timeout(3):
            await connection.close(0.2)
            outcomes = await asyncio.gather(*asked, late)
        assert set(outcomes) == {"UNAVAILABLE"}
        assert await _ask(connection, 41) == "UNAVAILABLE"
