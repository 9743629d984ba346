"""The embedded Redis: its URL is known before it runs, and stays the same after restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from urllib.parse import urlsplit

import pytest

from baton.state import State
from services.cli.up.embedded_redis import EmbeddedRedis
from services.common.processes.process_tree import descendants
from tests.support.command_lines import command_line
from tests.support.waiting import until


async def test_it_comes_back_where_it_was_whatever_happens(capfd: pytest.CaptureFixture[str]) -> None:
    before = set(descendants(os.getpid()))
    restarts: list[int] = []
    redis = EmbeddedRedis(restarts.append)
    state = State.at(redis.url)
    await redis.start()
    for restart in (1, 2):
        await state.check()
        (pid,) = set(descendants(os.getpid())) - before
        assert redis.url not in " ".join(command_line(pid))
        os.kill(pid, signal.SIGKILL)
        await until(lambda restart=restart: restarts[-1:] == [restart], 10)  # type: ignore[misc]
    await state.check()
    await state.close()
    await redis.stop()
    assert set(descendants(os.getpid())) == before
    err = capfd.readouterr().err
    assert err.count("the embedded Redis was killed by SIGKILL; restarting it, empty") == 2
    assert (urlsplit(redis.url).password or redis.url) not in err


async def test_no_other_process_gets_its_port() -> None:
    redis = EmbeddedRedis()
    port = urlsplit(redis.url).port
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", port))
    await redis.stop()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


async def test_a_stop_while_it_starts_leaves_nothing() -> None:
    before = set(descendants(os.getpid()))
    redis = EmbeddedRedis()
    starting = asyncio.create_task(redis.start())
    await until(lambda: set(descendants(os.getpid())) != before, 10)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await redis.stop()
    assert set(descendants(os.getpid())) == before
