"""Healthy workers that are given no processor for 10 s are neither killed nor lost: their streams go on.

What is injected: all threads of fronts and engines run on one processor, and only while nothing else wants it
(SCHED_IDLE), beside two processes that always do. Afterwards these end. Each output must be the right one, of
its first attempt, and no process may have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from baton.base.process_stat import is_running, process_stat
from services.common.processes.process_tree import descendants
from tests.e2e.support.cluster import Answer, Cluster, assert_all_free
from tests.e2e.support.workers import loose_workers
from tests.support.checkpoints import make_checkpoint

STARVED_S = 10.0
STREAMS, TOKENS = 4, 900
ENGINE = {"dtype": "float64", "numerics": "exact", "slots": STREAMS, "block_tokens": 16}


@contextlib.contextmanager
def starving(pids: Sequence[int]) -> Iterator[None]:
    """Leaves these processes what two busy ones leave of one processor, next to nothing."""
    (cpu, *_) = os.sched_getaffinity(0)
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), {cpu})
                os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for one in busy:
            os.sched_setaffinity(one.pid, {cpu})
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def cpu_s(pids: Sequence[int]) -> float:
    return sum(stat.cpu_s for pid in pids if (stat := process_stat(pid)) is not None)


async def outputs(cluster: Cluster, starved: Sequence[int]) -> list[Answer]:
    async with cluster.stub() as stub:
        asked = [
            asyncio.create_task(
                cluster.generate(
                    stub, range(3 + one, 9 + one), max_tokens=TOKENS, temperature=0, ignore_eos=True
                )
            )
            for one in range(STREAMS)
        ]
        if starved:
            await asyncio.sleep(0.5)
            with starving(starved):
                began, used = time.monotonic(), cpu_s(starved)
                await asyncio.sleep(STARVED_S)
                share = (cpu_s(starved) - used) / (time.monotonic() - began)
                assert share < 0.1, f"they were given {share:.0%} of a processor"
                assert not any(one.done() for one in asked), "the streams ended too early"
        return await asyncio.gather(*asked)


@pytest.mark.slow
async def test_workers_that_are_given_no_processor(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, seed=11, max_position_embeddings=1024)
    with loose_workers(model, "prefill", "decode", engine=ENGINE) as loose:
        wanted = await outputs(loose.cluster, [])
        fronts = [worker.front.pid for worker in loose.workers.values()]
        processes = [pid for front in fronts for pid in (front, *descendants(front))]
        came = await outputs(loose.cluster, processes)
        log = loose.cluster.log.read_text()
        assert all(map(is_running, processes)), log[-4000:]
        assert [one.token_ids for one in came] == [one.token_ids for one in wanted]
        assert all(one.last is not None and one.last.trace.attempts == 1 for one in came), log[-4000:]
        await assert_all_free(loose.cluster, 20)
