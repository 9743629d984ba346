"""Malformed requests: the router continues to serve and closes every connection."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from pathlib import Path

import pytest

from tests.router.api.inputs.test_answer_size import forget_peak, peak_bytes
from tests.router.conftest import SiteMaker, until
from tests.router.http_client import complete, http
from tests.router.raw_http import connect, get, post
from tests.router.test_process import config, fake_pair, ready, start

WHOLE = [
    get(),
    get("/v1/models"),
    post(max_tokens=3),
    post(max_tokens=3, stream=True, n=2),
    post("/v1/completions", "expect: 100-continue", max_tokens=2),
    post("/v1/completions", "connection: close", max_tokens=2),
    get("/health", "connection: upgrade", "upgrade: websocket"),
    get("/health", "connection: upgrade", "upgrade: h2c"),
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    b'5\r\n{"pro\r\n8\r\nmpt":"a"\r\n1\r\n}\r\n0\r\nx: y\r\n\r\n',
    b"GET /health HTTP/1.0\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"\r\n\r\n" + get(),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


def noise(dice: random.Random) -> bytes:
    """One to three requests in a row, some with a few bytes changed, lost, doubled or cut off."""
    data = bytearray(b"".join(dice.choices(WHOLE, k=dice.randint(1, 3))))
    for _ in range(dice.choice((0, 0, 1, 3))):
        at = dice.randrange(len(data))
        match dice.randrange(4):
            case 0:
                data[at] = dice.randrange(256)
            case 1:
                del data[at : at + dice.randint(1, 20)]
            case 2:
                data[at:at] = data[at : at + dice.randint(1, 200)] * dice.choice((1, 3, 100))
            case _:
                del data[at:]
        if not data:
            break
    return bytes(data)


async def one(address: str, dice: random.Random) -> None:
    """Sends noise in a few pieces; leaves at once, or reads until nothing comes any more."""
    async with connect(address) as raw:
        data = noise(dice)
        with contextlib.suppress(ConnectionError, TimeoutError):
            cut = dice.randint(0, len(data))
            await raw.send(data[:cut])
            await asyncio.sleep(dice.choice((0, 0.01)))
            await raw.send(data[cut:])
            if dice.random() < 0.7:
                await raw.closed(0.1)


@pytest.mark.parametrize(
    "connections", [pytest.param(300, id="300"), pytest.param(20_000, id="20,000", marks=pytest.mark.slow)]
)
async def test_noise(
    site: SiteMaker, connections: int, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(7)
    async with site() as here:
        for _ in range(connections // 20):
            await asyncio.gather(*(one(here.addresses["http"], dice) for _ in range(20)))
        await until(lambda: here.router.connections.count == 0)
        await until(lambda: here.router.dispatcher.running == 0)
        async with http(here) as client:
            assert (await complete(client, max_tokens=4)).status_code == 200
    assert "Traceback" not in caplog.text + "".join(capsys.readouterr())


async def test_endless_headers_take_little_memory(model_folder: Path) -> None:
    """Eight connections that send 64 MB in one header each, as fast as they can."""

    async def flood(address: str) -> None:
        async with connect(address) as raw:
            with contextlib.suppress(ConnectionError):
                await raw.send(b"GET /health HTTP/1.1\r\nx: ")
                for _ in range(1024):
                    await raw.send(b"a" * 65_536)

    async with fake_pair(model_folder) as worker:
        process = await start(config(model_folder, [worker.address]), sys.executable, "-m", "services.router")
        address = (await ready(process))["http"]
        forget_peak(process.pid)
        before = peak_bytes(process.pid)
        await asyncio.gather(*(flood(address) for _ in range(8)))
        grown = peak_bytes(process.pid) - before
        print(f"router's peak + {grown:,} bytes")
        process.kill()
        await process.wait()
        assert grown < 16 << 20
