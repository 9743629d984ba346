"""The first step of an admitted sequence is the next one to begin, whenever it is admitted. Steps are those
of the graphs, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from baton.device.streams.graphs import Graph
from baton.engine.decode.graph_step import StepGraphs
from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
from baton.engine.plan.decode_rows import QUEUED
from tests.engine.local_engine import LocalEngine
from tests.support.gpu_sleep import sleep_on_stream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = [5, 6, 7]
# Clock cycles of a GPU: some 0.3 s.
SLEEP = 500_000_000


def engine_of(folder: Path, slots: int = 4) -> tuple[LocalEngine, GraphDecodeLoop]:
    engine = LocalEngine(folder / "model", slots=slots, device=DEVICE, graph=True)
    return engine, cast(GraphDecodeLoop, engine.decode)


def seen_to_end(loop: GraphDecodeLoop) -> int:
    loop.observe()
    return loop.steps.ended


def settle(engine: LocalEngine) -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    engine.read()


def test_a_sequence_admitted_to_an_idle_worker_is_in_the_first_step(tmp_path: Path) -> None:
    engine, _ = engine_of(tmp_path)
    key = engine.start(PROMPT, max_tokens=4)
    assert engine.step()
    settle(engine)
    assert len(engine.output[key]) == 2, "the token it was admitted with, and its first step's"


@pytest.mark.skipif(DEVICE == "cuda", reason="the host cannot post at a known point of a step on a GPU")
@pytest.mark.parametrize("while_it_computes", ["attend", "head"])
def test_a_sequence_admitted_while_a_step_runs_is_in_the_next_one(
    tmp_path: Path, while_it_computes: str
) -> None:
    """The admission comes before the sampler, the shortest part of a step, begins."""
    engine, loop = engine_of(tmp_path)
    running = engine.start(PROMPT, max_tokens=20)
    engine.step()
    step = loop.step_state
    joined: list[tuple[int, int]] = []
    step.fetch = lambda: None  # as for a replay that is enqueued while another one runs
    compute = getattr(step.pass_, while_it_computes)

    def compute_and_admit(*arguments: object) -> torch.Tensor:
        if not joined:
            joined.append(engine.start([9, 8], max_tokens=4))
        return cast(torch.Tensor, compute(*arguments))

    setattr(step.pass_, while_it_computes, compute_and_admit)
    loop.steps.arriving = range(1)
    engine.step()
    assert len(engine.output[running]) == 3
    assert engine.output[joined[0]] == [], "it was posted when this step had begun"
    engine.step()
    assert len(engine.output[joined[0]]) == 2


def test_replays_have_room_for_admissions_that_are_expected(tmp_path: Path) -> None:
    """The room is for at most a few rows more, and never for more than there are slots."""
    engine, loop = engine_of(tmp_path, slots=24)
    for number in range(4):
        engine.start([*PROMPT, number], max_tokens=30)
    engine.step()
    settle(engine)
    used: list[int] = []

    def counted(bucket: int, graph: Graph) -> Graph:
        def replay() -> None:
            used.append(bucket)
            graph()

        return replay

    loop.graphs = {
        bucket: StepGraphs(counted(bucket, graphs.simple), graphs.samples)
        for bucket, graphs in loop.graphs.items()
    }
    for expected, bucket in ((0, 4), (1, 8), (100, 8), (0, 4)):
        loop.steps.arriving = range(expected)
        assert engine.step()
        settle(engine)
        assert used[-1] == bucket


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_on_a_gpu_a_sequence_admitted_behind_queued_steps_is_in_the_first_of_them(tmp_path: Path) -> None:
    engine, loop = engine_of(tmp_path)
    running = engine.start(PROMPT, max_tokens=50)
    assert engine.step()
    settle(engine)
    assert len(engine.output[running]) == 2, "it is in the first step of an idle worker"
    with torch.cuda.stream(loop.queue.stream):
        sleep_on_stream(SLEEP)
    loop.steps.arriving = range(1)
    queued = 0
    while engine.step():
        queued += 1
    assert queued >= QUEUED
    ended = seen_to_end(loop)
    joined = engine.start([9, 8, 7], max_tokens=20)
    assert seen_to_end(loop) == ended, "the queued steps began too early for this test"
    settle(engine)
    assert len(engine.output[running]) == 2 + queued
    assert len(engine.output[joined]) == 1 + queued
