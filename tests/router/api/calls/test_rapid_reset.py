"""Clients that send requests and cancel each at once, without end (CVE-2023-44487): what they start is
bounded, ends, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from services.router.workers import directory
from tests.router.conftest import MODEL, Site, SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected
from tests.router.http_client import http
from tests.router.raw_http2 import Http2, headers, message

_CALL = "/baton.v1.RouterService/Generate"
# Streams, or requests, that one connection sends at a time.
_AT_ONCE = 50
_MIB = 1 << 20
PROMPT = [3, 1, 4]


@pytest.fixture(autouse=True)
def unhurried_heart(site: SiteMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers share this process with the attackers, and are not lost when it is busy."""
    monkeypatch.setattr(directory, "HEARTBEAT_S", 2.0)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def reset_streams(address: str, count: int, after_s: float = 0) -> None:
    """Over HTTP/2: one connection after another, where the server ends them."""
    block = headers(_CALL, address)
    data = message(ids_request(PROMPT, 200).SerializeToString())
    connection = Http2.connect(address)
    try:
        for _ in range(count // _AT_ONCE):
            try:
                connection.open_and_reset(block, data, _AT_ONCE, after_s)
            except OSError:  # ended by the server
                connection.goaway = True
            if connection.goaway:
                connection.peer.close()
                connection = Http2.connect(address)
    finally:
        connection.peer.close()


def reset_connections(address: str, count: int) -> None:
    """Over HTTP/1: a connection for each request, which is reset."""
    host, _, port = address.rpartition(":")
    body = json.dumps(
        {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(body)}\r\n"
    for _ in range(count):
        with socket.create_connection((host, int(port)), timeout=20) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)


async def served_meanwhile(here: Site, attack: Callable[[], None]) -> int:
    """Runs the attack in a thread; how many requests of others were served rightly until it ended."""
    served = 0
    thread = threading.Thread(target=attack)
    thread.start()
    try:
        async with http(here) as client:
            client.timeout = 60
            while thread.is_alive() or not served:
                over_grpc = tokens_of(await here.generate(ids_request(PROMPT, 4), timeout=60))
                assert over_grpc == expected(PROMPT, 4)
                body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                served += 1
    finally:
        await asyncio.to_thread(thread.join)
    return served


async def flood(site: SiteMaker, count: int) -> None:
    """Sends `count` calls of each kind, twice: the memory that the first round takes may stay for the
    second."""
    async with site(slots=64) as here:
        here.worker("decode-0").behaviour.step_s = 0.15
        grew = 0
        attacks: tuple[tuple[str, Callable[[str, int], None]], ...] = (
            ("grpc", reset_streams),
            ("grpc", partial(reset_streams, after_s=0.2)),  # the router has begun many of them
            ("http", reset_connections),
        )
        for name, attack in attacks:
            for _ in range(2):
                before = resident_bytes()
                # Each over HTTP starts work at the fakes, which share this process.
                many = count if name == "grpc" else min(count, 500)
                served = await served_meanwhile(here, partial(attack, here.addresses[name], many))
                grew = resident_bytes() - before
                # Nothing of the attackers' runs or waits any more, at workers either: left alone it would run
                # for half a minute.
                await until(lambda: not here.not_released(), 15)
                print(f"{name}: {many} cancelled, {served} served meanwhile, {grew / _MIB:.1f} MiB more")
            assert grew < 64 * _MIB


async def test_a_flood_of_cancelled_requests(site: SiteMaker) -> None:
    await flood(site, 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_a_long_flood_of_cancelled_requests(site: SiteMaker) -> None:
    await flood(site, 4_000)
