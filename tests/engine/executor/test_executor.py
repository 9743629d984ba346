"""Plans made by hand, and what the executor launched: rows, tokens, slots, and what it recorded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch

from baton.device.streams.graphs import Graph
from baton.engine.decode.graph_step import StepGraphs
from baton.engine.executor.executor import StepExecutor
from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
from baton.engine.executor.step_handle import ChunkResult, DecodeHandle, PrefillHandle, StepHandle
from baton.engine.plan.step_plan import Chunk, DecodeRows, StepPlan
from baton.engine.sequence import Limits, SamplingParams, Sequence
from bench.engine_driver import take
from tests.engine.executor.slow_device import Ahead, SlowDecode
from tests.engine.local_engine import LocalEngine


class Held:
    """A context that knows whether it is held."""

    def __init__(self) -> None:
        self.held = False

    def __enter__(self) -> None:
        self.held = True

    def __exit__(self, *_: object) -> None:
        self.held = False


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 33, 9)]


def queued(engine: LocalEngine, prompt: tuple[int, ...]) -> Sequence:
    """A prompt that has its blocks."""
    sequence = Sequence(prompt, len(prompt), SamplingParams(), Limits(4))
    engine.scheduler.add(sequence)
    engine.scheduler.allocate_blocks(0.0)
    assert sequence.blocks is not None
    return sequence


def test_chunks_are_launched_as_the_plan_has_them(tmp_path: Path) -> None:
    """Not as the planner would: a prompt of 33 tokens in 20 and 13 beside others, in another order."""
    engine = LocalEngine(tmp_path / "model", blocks=64)
    drawn: dict[tuple[int, ...], int] = {}
    plain = LocalEngine(tmp_path / "model", blocks=64)
    for prompt in PROMPTS:
        plain.scheduler.add(Sequence(prompt, len(prompt), SamplingParams(), Limits(4)))
    wanted = {result.chunk.sequence.token_ids: result.token for result in plain.compute() if result.draws}
    short, long, third = (queued(engine, prompt) for prompt in PROMPTS)
    plans = [
        StepPlan((Chunk(long, 0, 20), Chunk(short, 0, 3))),
        StepPlan((Chunk(third, 0, 9), Chunk(long, 20, 13))),
    ]
    for plan in plans:
        handle = engine.executor.launch(plan)
        assert isinstance(handle, PrefillHandle)
        assert handle.ended(), "a CPU's steps have"
        assert [chunk.sequence.begun for chunk in plan.chunks] == [c.start + c.count for c in plan.chunks]
        for result in take(engine.executor):
            if result.token is not None:
                drawn[result.chunk.sequence.token_ids] = result.token
    assert drawn == wanted
    assert [one.computed for one in (short, long, third)] == [3, 33, 9]
    assert engine.pools.pinned == 0


@pytest.mark.parametrize("graph", [False, True])
def test_a_decode_step_runs_when_its_plan_is_launched_and_only_then(tmp_path: Path, *, graph: bool) -> None:
    engine = LocalEngine(tmp_path / "model", graph=graph, device=DEVICE)
    key = engine.start(PROMPTS[0], max_tokens=4)
    for number in range(1, 4):
        handle = engine.executor.launch(StepPlan(decode=DecodeRows(4)))
        assert isinstance(handle, DecodeHandle)
        until_ended(engine, handle)
        assert len(engine.output[key]) == 1 + number, "the token it was admitted with, and one a step"
    plain = LocalEngine(tmp_path / "model", device=DEVICE)
    assert [engine.output[key]] == plain.run(plain.start(PROMPTS[0], max_tokens=4))


def test_steps_with_rows_for_drafts_are_counted(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "model", device=DEVICE)
    key = engine.start(PROMPTS[0], max_tokens=8)
    for rows in (DecodeRows(4), DecodeRows(4, drafts=True), DecodeRows(4, drafts=True), DecodeRows(4)):
        engine.executor.launch(StepPlan(decode=rows))
    assert engine.executor.speculative_steps == 2
    assert len(engine.run(key)[0]) == 8


@pytest.mark.parametrize("mixed", ["", "eager"])
def test_both_in_one_plan_run_in_one_launch_or_one_after_the_other(
    tmp_path: Path, mixed: Literal["", "eager"]
) -> None:
    """On a device whose passes take rows of decode along, and by the reference, with the same tokens."""
    engine = LocalEngine(tmp_path / "model", blocks=64, graph=bool(mixed), mixed=mixed, device=DEVICE)
    key = engine.start(PROMPTS[0], max_tokens=6)
    prompt = queued(engine, PROMPTS[2])
    handle = engine.executor.launch(StepPlan((Chunk(prompt, 0, 9),), DecodeRows(4)))
    results = until_ended(engine, handle)
    assert len(engine.output[key]) == 2
    assert engine.decode.steps.launched == engine.decode.steps.mixed_at or not mixed
    plain = LocalEngine(tmp_path / "model", blocks=64, device=DEVICE)
    alone, other = plain.start(PROMPTS[0], max_tokens=6), plain.start(PROMPTS[2], max_tokens=4)
    wanted, of_prompt = plain.run(alone, other)
    assert [result.token for result in results] == of_prompt[:1]
    assert engine.run(key) == [wanted]


def test_the_graph_of_a_planned_batch_and_sampler_is_replayed(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "model", slots=8, graph=True, device=DEVICE)
    loop, used = cast(GraphDecodeLoop, engine.decode), list[tuple[int, str]]()

    def noted(batch: int, sampler: str) -> Graph:
        return lambda: used.append((batch, sampler))

    loop.graphs = {
        batch: StepGraphs(simple=noted(batch, "simple"), samples=noted(batch, "full"))
        for batch in loop.graphs
    }
    for rows in (DecodeRows(2), DecodeRows(8, simple=False), DecodeRows(1)):
        engine.executor.launch(StepPlan(decode=rows))
    assert used == [(2, "simple"), (8, "full"), (1, "simple")]
    assert loop.steps.queued == 3, "a plan is launched, whatever a planner would have said"


def test_a_mixed_plan_has_its_rows_in_the_pass_and_counts_as_both() -> None:
    decode = SlowDecode()
    ahead = Ahead(tokens=100, decode=decode)
    prompt = ahead.add(30)
    ahead.scheduler.allocate_blocks(0.0)
    plan = StepPlan((Chunk(prompt, 0, 30),), DecodeRows(4), expected_s=0.05, decode_s=0.02)
    handle = ahead.executor.launch(plan)
    assert (ahead.passes.joined, ahead.stream.rows) == ([decode], [30])
    assert (list(ahead.loop.state.under_way), ahead.loop.ends_in_s) == ([plan], 0.05)
    assert not handle.ended()
    assert ahead.pools.pinned == 8, "blocks that the step writes"
    ahead.stream.now = 0.05
    assert handle.ended()
    (result,) = take(ahead.executor)
    assert result.chunk == plan.chunks[0]
    assert ahead.loop.times.busy_s == pytest.approx(0.03 - 0.02)
    assert ahead.pools.pinned == 0


def test_an_engine_without_decode_steps_refuses_them() -> None:
    ahead = Ahead(tokens=100)
    with pytest.raises(ValueError, match="no decode steps run here: decode batch 4"):
        ahead.executor.launch(StepPlan(decode=DecodeRows(4)))


def until_ended(engine: LocalEngine, handle: StepHandle) -> list[ChunkResult]:
    """Waits for a step, and reads what it has left."""
    until = time.monotonic() + 60
    engine.decode.observe()
    while not handle.ended():
        assert time.monotonic() < until, "a step has not ended"
        engine.decode.observe()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    results = take(engine.executor)
    engine.read()
    return results


def test_a_step_is_launched_while_no_other_thread_may_wait_for_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, context, seen = LocalEngine(tmp_path / "model", blocks=64), Held(), list[bool]()
    executor = StepExecutor(engine.executor.planner, engine.prefill, engine.decode, context)
    for loop in (engine.prefill, engine.decode):
        launch = loop.launch

        def look(*arguments: Any, launch: Any = launch) -> Any:
            seen.append(context.held)
            return launch(*arguments)

        monkeypatch.setattr(loop, "launch", look)
    executor.launch(StepPlan((Chunk(queued(engine, PROMPTS[0]), 0, 3),)))
    take(executor)
    engine.start(PROMPTS[2], max_tokens=3)
    seen.clear()
    assert executor.step_decode() is not None
    executor.launch(StepPlan((Chunk(queued(engine, PROMPTS[1]), 0, 3),)))
    assert seen == [True, True]
    assert not context.held
