"""A pair of workers that a stall has put on the slower transport goes back to the better one by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.v1.worker_pb2 import IntegrityReport
from tests.e2e.support.cluster import Cluster, assert_all_free, baton_up
from tests.e2e.support.own_engine import program

PROMPT = list(range(1, 60))
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
STOPPED_S = 0.9
RETURNS_S = 15.0


@pytest.mark.slow
async def test_a_link_returns_to_shared_memory_after_a_stall(model: Path) -> None:
    flags = ("--prefill", "1", "--decode", "1", "--dtype", "float64")
    with baton_up(model, *flags, program=program("tests.e2e.support.impatient_links")) as cluster:
        async with cluster.stub() as stub:
            first = await cluster.generate(stub, PROMPT, **GREEDY)
            assert await transports(cluster) == ["ipc"]
            stopped = (await cluster.reports())["decode-0"].engine_pid
            asking = asyncio.create_task(_ask_on(cluster, stub, first.token_ids))
            os.kill(stopped, signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            os.kill(stopped, signal.SIGCONT)
            await until(cluster, lambda report: report.link_fallbacks == 1)
            report = await until(cluster, lambda report: [link.transport for link in report.links] == ["ipc"])
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await assert_all_free(cluster, 5.0)
        assert report.links_returned == 1
        lines = cluster.log.read_text().splitlines()
        for event in ("link_fallback", "link_returned"):
            (line,) = [line for line in lines if f"event='{event}'" in line]
            assert "worker='prefill-0'" in line


async def transports(cluster: Cluster) -> list[str]:
    return [link.transport for link in (await cluster.reports())["prefill-0"].links]


async def until(cluster: Cluster, what: Callable[[IntegrityReport], bool]) -> IntegrityReport:
    """Prefill's report, once it is so."""
    deadline = time.monotonic() + RETURNS_S
    while not what(report := (await cluster.reports())["prefill-0"]):
        assert time.monotonic() < deadline, [link.transport for link in report.links]
        await asyncio.sleep(0.02)
    return report


async def _ask_on(cluster: Cluster, stub: Any, expected: list[int]) -> None:
    """One request after the other; some may fail while the link is away, none may be wrong."""
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            assert (await cluster.generate(stub, PROMPT, **GREEDY)).token_ids == expected
        await asyncio.sleep(0.02)
