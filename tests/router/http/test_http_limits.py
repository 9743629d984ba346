"""Limits on what one HTTP connection may send, and on how long it may take."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import pytest

from tests.router.conftest import SiteMaker, until
from tests.router.http_client import complete, http
from tests.router.raw_http import connect, get, post

LONG = "x-long: " + "a" * 20_000
MANY = [f"x-{number}: 1" for number in range(101)]


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(get("/health", LONG), id="a long header"),
        pytest.param(get("/health", *MANY), id="many headers"),
        pytest.param(get("/health?" + "a" * 20_000), id="a long path"),
        pytest.param(post("/v1/completions", LONG), id="a long header before a body"),
    ],
)
async def test_a_head_above_the_limits_is_431(site: SiteMaker, request_bytes: bytes) -> None:
    async with site() as here, connect(here.addresses["http"]) as raw:
        await raw.send(request_bytes)
        status, body = await raw.answer()
        assert status == 431
        assert json.loads(body)["error"]["code"] == "headers_too_large"
        await raw.closed()
        assert not here.worker("prefill-0").prefill.prompts


async def test_a_header_without_end_is_431_before_it_takes_memory(site: SiteMaker) -> None:
    async with site() as here, connect(here.addresses["http"]) as raw:
        await raw.send(b"GET /health HTTP/1.1\r\nx-long: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 4 << 20:
                await raw.send(b"a" * 4096)
                sent += 4096
                await asyncio.sleep(0)
        assert sent < 4 << 20


async def test_trailers_without_end_are_refused(site: SiteMaker) -> None:
    """A chunked body's trailer is kept by the parser, as a header is."""
    head = post("/v1/completions", "transfer-encoding: chunked").partition(b"content-length")[0]
    head += b"\r\n2\r\n{}\r\n0\r\nx: "
    async with site() as here, connect(here.addresses["http"]) as raw:
        await raw.send(head)
        for _ in range(10):
            await raw.send(b"a" * 4096)
        status, _ = await raw.answer()
        assert status == 431


async def test_limits_leave_usual_requests_alone(site: SiteMaker) -> None:
    headers = [f"x-{number}: {'v' * 100}" for number in range(90)]
    async with site() as here, connect(here.addresses["http"]) as raw:
        for _ in range(3):  # on one connection, byte by byte at its beginning
            request = post("/v1/completions", *headers, max_tokens=2)
            for byte in request[:40]:
                await raw.send(bytes([byte]))
            await raw.send(request[40:])
            status, body = await raw.answer()
            assert status == 200
            assert json.loads(body)["usage"]["completion_tokens"] == 2
        await raw.send(get() + get("/version") + get())  # pipelined
        assert [(await raw.answer())[0] for _ in range(3)] == [200, 200, 200]


async def test_a_head_that_does_not_end_in_time_is_408(site: SiteMaker) -> None:
    async with site(connections={"head_timeout_s": 0.3}) as here, connect(here.addresses["http"]) as raw:
        started = time.monotonic()
        await raw.send(b"GET /health HTTP/1.1\r\n")

        async def trickle() -> None:
            while True:
                await raw.send(b"x-a: b\r\n")
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        status, body = await raw.answer(3)
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        assert time.monotonic() - started >= 0.3
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)


async def test_a_body_that_does_not_end_in_time_is_408(site: SiteMaker) -> None:
    async with site(connections={"body_timeout_s": 0.3}) as here, connect(here.addresses["http"]) as raw:
        await raw.send(post()[:-5])
        status, body = await raw.answer(3)
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        await raw.closed()
        async with http(here) as client:
            assert (await complete(client, max_tokens=2)).status_code == 200


@pytest.mark.parametrize("request_bytes", [b"", get()], ids=["at once", "after an answer"])
async def test_an_idle_connection_is_closed(site: SiteMaker, request_bytes: bytes) -> None:
    async with site(connections={"idle_timeout_s": 0.3}) as here, connect(here.addresses["http"]) as raw:
        await raw.send(request_bytes)
        await raw.closed(3)


async def test_a_running_request_outlives_every_timeout_of_its_connection(site: SiteMaker) -> None:
    short = {"head_timeout_s": 0.1, "body_timeout_s": 0.1, "idle_timeout_s": 0.1, "write_timeout_s": 0.1}
    async with site(connections=short) as here, connect(here.addresses["http"]) as raw:
        here.worker("decode-0").behaviour.step_s = 0.02
        await raw.send(post(max_tokens=40))
        status, body = await raw.answer()
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 40)


async def test_bodies_that_do_not_arrive_take_bounded_memory(site: SiteMaker) -> None:
    """The largest of them gives way."""
    async with site(connections={"max_buffered_body_mb": 1}) as here:
        address = here.addresses["http"]
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        async with connect(address) as first, connect(address) as second, connect(address) as third:
            for raw, size in ((first, 600_000), (second, 400_000), (third, 300_000)):
                await raw.send(head + b"content-length: 600001\r\n\r\n" + b" " * size)
                await asyncio.sleep(0.05)
            status, body = await first.answer()
            assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
            await second.send(b" " * 200_001)
            assert (await second.answer())[0] == 400  # whole, and no JSON


async def test_a_client_that_sent_more_and_goes_away_ends_what_runs(site: SiteMaker) -> None:
    """The first request runs, the others wait behind it on the same connection."""
    async with site() as here:
        here.worker("decode-0").behaviour.step_s = 0.05
        async with connect(here.addresses["http"]) as raw:
            await raw.send(post(max_tokens=200) + post(max_tokens=200) + post(max_tokens=200))
            await until(lambda: here.worker("decode-0").decode.used_slots == 1)
        await here.quiet()
        assert len(here.worker("prefill-0").prefill.prompts) == 1
