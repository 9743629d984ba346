"""Fronts, engines and mask processes of every role are preempted for 10 to 60 ms, over and over, under load.

What is injected: SIGSTOP of each process of three workers, at random and independently, while canary
generations, streams, guided requests, handoffs between workers and local handoffs run. Each process must live
to the end, and each output must be the one that came without pauses.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.base.process_stat import is_running
from services.common.processes.process_tree import descendants
from tests.e2e.support import eager_canaries
from tests.e2e.support.cluster import MODEL, assert_all_free
from tests.e2e.support.workers import Loose, loose_workers

SECONDS = int(os.environ.get("BATON_PAUSES_S", "600"))
CLIENTS = 6
STOPPED_S, RUNNING_S = (0.010, 0.060), (0.002, 0.040)
ENGINE = {"dtype": "float64", "numerics": "exact", "slots": 8, "block_tokens": 16, "chunk_tokens": 16}


@dataclass(frozen=True)
class Ask:
    """A completion; `regex`: what it must match."""

    prompt: tuple[int, ...]
    max_tokens: int
    regex: str | None

    def body(self) -> dict[str, Any]:
        guided = {} if self.regex is None else {"structured_outputs": {"regex": self.regex}}
        return {
            "model": MODEL,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            **guided,
        }


def asks_of(count: int) -> list[Ask]:
    draw = random.Random(count)
    return [
        Ask(
            prompt=tuple(draw.choices(range(3, 60), k=draw.randint(1, 60))),
            max_tokens=draw.choice((5, 40, 200)),
            regex=draw.choice((None, None, "[a-f]{6}[0-9]{2}")),
        )
        for _ in range(count)
    ]


async def answer(client: httpx.AsyncClient, ask: Ask) -> tuple[str, str]:
    response = await client.post("/v1/completions", json=ask.body())
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["text"], choice["finish_reason"]


async def pause_at_random(pid: int, draw: random.Random, until: float) -> int:
    """The number of pauses, each of which ended before this returns."""
    pauses = 0
    while time.monotonic() < until and is_running(pid):
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(draw.uniform(*STOPPED_S))
        finally:
            os.kill(pid, signal.SIGCONT)
        pauses += 1
        await asyncio.sleep(draw.uniform(*RUNNING_S))
    return pauses


async def ask_for_long(
    client: httpx.AsyncClient, asks: Sequence[Ask], truth: Sequence[tuple[str, str]], seed: int, until: float
) -> int:
    """The number of answers, each of them the right one."""
    draw, answers = random.Random(seed), 0
    while time.monotonic() < until:
        number = draw.randrange(len(asks))
        assert await answer(client, asks[number]) == truth[number]
        answers += 1
    return answers


async def prove(loose: Loose, seconds: float) -> str:
    asks = asks_of(24)
    async with loose.cluster.http() as client:
        truth = await asyncio.gather(*(answer(client, ask) for ask in asks))
        fronts = [worker.front.pid for worker in loose.workers.values()]
        processes = [pid for front in fronts for pid in (front, *descendants(front))]
        until = time.monotonic() + seconds
        pausing = [
            asyncio.create_task(pause_at_random(pid, random.Random(pid_number), until))
            for pid_number, pid in enumerate(processes)
        ]
        answers = await asyncio.gather(
            *(ask_for_long(client, asks, truth, seed, until) for seed in range(CLIENTS))
        )
        pauses = await asyncio.gather(*pausing)
    log = loose.cluster.log.read_text()
    assert all(map(is_running, processes)), log[-4000:]
    assert "unknown_sequence_dropped" not in log
    await assert_all_free(loose.cluster, 10)
    return f"{len(processes)} processes, {sum(pauses)} pauses, {sum(answers)} answers"


@pytest.mark.slow
async def test_ten_minutes_of_pauses(model: Path) -> None:
    with loose_workers(
        model,
        "prefill",
        "decode",
        "both",
        worker_program=eager_canaries.PROGRAM,
        engine=ENGINE,
        canary=True,  # type: ignore[arg-type]
    ) as loose:
        print(f"\nPROOF pauses: {await prove(loose, SECONDS)}")
