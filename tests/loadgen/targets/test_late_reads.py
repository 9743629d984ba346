"""The time by which tokens were read later than they came, where the connection knows it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest

from loadgen.common.record import Record
from tests.certificates import self_signed
from tests.loadgen.fake_server import Behaviour, serving
from tests.loadgen.targets.asking import ask


class Aside(threading.Thread):
    """A server in a thread of its own, which answers while this one's event loop stands still. It
    records when it sent each token."""

    def __init__(self, sent_after: tuple[float, ...], tls: ssl.SSLContext | None = None) -> None:
        super().__init__(daemon=True)
        self._sent_after = sent_after
        self._tls = tls
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.sent: list[float] = []
        self.start()

    def run(self) -> None:
        with self._listening:
            connection, _ = self._listening.accept()
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_side=True)
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            for number, pause in enumerate(self._sent_after):
                time.sleep(pause)
                choice = {"index": 0, "text": " w", "token_ids": [number]}
                if number + 1 == len(self._sent_after):
                    choice["finish_reason"] = "length"
                self.sent.append(time.monotonic())
                connection.sendall(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())


async def standing_still(url: str, begin_s: float, seconds: float) -> Record:
    """One request, during which the event loop does nothing for a while."""
    asyncio.get_running_loop().call_later(begin_s, time.sleep, seconds)
    (record,), _, (failure,) = await ask(url, tokens=2)
    assert failure is None
    return record


async def test_http_knows_how_late_it_read() -> None:
    """The loop sleeps from 50 to 250 ms; a token comes in the middle of that, another one long after."""
    server = Aside((0.15, 0.3))
    record = await standing_still(f"http://127.0.0.1:{server.port}", 0.05, 0.2)
    came = record.token_times[0]
    assert record.first_late is not None
    assert record.last_late is not None
    assert record.first_late == pytest.approx(came - server.sent[0], abs=0.01)
    assert 0.03 < record.first_late < 1.0
    assert 0.0 <= record.last_late < record.first_late


async def test_https_knows_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, trusted = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    server = Aside((0.15, 0.3), context)
    record = await standing_still(f"https://127.0.0.1:{server.port}", 0.05, 0.2)
    assert record.first_late == pytest.approx(record.token_times[0] - server.sent[0], abs=0.01)
    assert record.first_late is not None
    assert record.first_late > 0.03


async def test_grpc_does_not_know() -> None:
    async with serving(Behaviour()) as (_, grpc_url, _):
        (record,), _, _ = await ask(grpc_url)
    assert len(record.token_times) == 5
    assert (record.first_late, record.last_late) == (None, None)
