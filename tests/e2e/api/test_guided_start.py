"""The first guided request of a cluster whose cores are slow: its processes take longer to start than a
reservation without a grammar may take."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Collection
from pathlib import Path

import pytest

from baton.v1.types_pb2 import Grammar
from models.demo_training.evaluate import DEMO_MODEL
from services.router.lifecycle.attempt_calls import RESERVE_S
from tests.e2e.support.cluster import Cluster, assert_all_free, baton_up, descendants

PROMPT = [7, 8, 9, 10, 11, 12]
PROGRAMS = ("services.grammar.process", "services.grammar.compile_process")


@pytest.mark.slow
@pytest.mark.parametrize("late", [PROGRAMS, PROGRAMS[:1]], ids=["all", "masks"])
async def test_the_first_guided_request_waits_for_processes_that_start_slowly(late: Collection[str]) -> None:
    with baton_up(DEMO_MODEL, "--prefill", "1", "--decode", "1") as cluster:
        stopping = asyncio.create_task(stop_new_processes(cluster, late, RESERVE_S + 2))
        async with cluster.stub() as stub:
            answer = await cluster.generate(stub, PROMPT, grammar=Grammar(regex="[a-f]{6}"), max_tokens=20)
        assert await stopping > 1
        assert len(answer.text) == 6
        assert answer.last is not None
        assert answer.last.trace.attempts == 1
        await assert_all_free(cluster, within_s=5)


async def stop_new_processes(cluster: Cluster, programs: Collection[str], for_s: float) -> int:
    """Stops each process of these programs as soon as it is there, for `for_s` seconds; returns how many."""
    stopped: set[int] = set()
    until = None
    loop = asyncio.get_running_loop()
    while until is None or loop.time() < until:
        for pid in descendants(cluster.process.pid):
            with contextlib.suppress(OSError):
                if pid not in stopped and is_of(pid, programs):
                    os.kill(pid, signal.SIGSTOP)
                    stopped.add(pid)
                    until = until or loop.time() + for_s
        await asyncio.sleep(0.02)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    return len(stopped)


def is_of(pid: int, programs: Collection[str]) -> bool:
    """True if a process runs one of these modules."""
    return not set(programs).isdisjoint(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
