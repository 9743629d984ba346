"""Decode steps that are part of prefill steps: tokens are those of steps by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from baton.device.streams.graphs import Graph
from baton.engine.decode.graph_step import StepGraphs
from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
from baton.engine.forward.joined_rows import JoinedRows, row_count
from baton.engine.plan.decode_rows import mixed_batches_up_to, rows_to_mix
from baton.engine.plan.prefill_scheduler import StepBounds
from baton.engine.plan.step_plan import StepPlan
from baton.engine.prefill.graphs import PrefillGraphs
from baton.engine.prefill.step_inputs import StepInputs
from baton.engine.sequence import SamplingParams
from tests.engine.local_engine import LocalEngine, Start

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 33, 9, 16, 5)]
GREEDY, DRAWN = SamplingParams(), SamplingParams(0.9, seed=2**63 + 11)
FILTERED = SamplingParams(0.9, 20, 0.95, seed=7)


def alone(folder: Path, number: int, sampling: SamplingParams, max_tokens: int) -> list[int]:
    engine = LocalEngine(folder / "model", device=DEVICE)
    key = engine.start(PROMPTS[number], max_tokens=max_tokens, sampling=sampling)
    return engine.run(key)[0]


def mixed(folder: Path, how: str = "eager", **options: object) -> LocalEngine:
    return LocalEngine(
        folder / "model", device=DEVICE, graph=True, mixed=how, **options,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("how", ["eager", pytest.param("graphs", marks=pytest.mark.slow)])
def test_sequences_go_on_while_prompts_are_computed(tmp_path: Path, how: str) -> None:
    engine = mixed(tmp_path, how)
    first = engine.start(PROMPTS[0], max_tokens=7)
    assert engine.mixed_steps == 0, "nothing was decoded"
    second = engine.start(PROMPTS[1], max_tokens=5, sampling=DRAWN)  # three steps
    engine.read()
    assert engine.mixed_steps == 3
    assert len(engine.output[first]) == 4, "the token it was admitted with, and one a step"
    third, fourth = engine.start_many([Start(PROMPTS[2], 3), Start(PROMPTS[4], 3)])
    assert engine.mixed_steps == 4
    outputs = engine.run(first, second, third, fourth)
    given = (0, GREEDY, 7), (1, DRAWN, 5), (2, GREEDY, 3), (4, GREEDY, 3)
    assert outputs == [alone(tmp_path, *each) for each in given]


def test_a_step_that_needs_the_other_sampler_runs_by_itself(tmp_path: Path) -> None:
    engine = mixed(tmp_path)
    first = engine.start(PROMPTS[0], max_tokens=4, sampling=FILTERED)
    second = engine.start(PROMPTS[2], max_tokens=2)
    assert engine.mixed_steps == 0
    assert engine.run(first, second) == [
        alone(tmp_path, 0, FILTERED, 4),
        alone(tmp_path, 2, GREEDY, 2),
    ]


def test_slots_that_are_held_do_not_join(tmp_path: Path) -> None:
    engine = mixed(tmp_path, slots=2)
    held = engine.start(PROMPTS[0], max_tokens=5, capacity=len(PROMPTS[0]) + 1)
    while engine.step():
        pass
    before = engine.mixed_steps
    other = engine.start(PROMPTS[4], max_tokens=2)
    assert engine.mixed_steps == before
    engine.extend(held, len(PROMPTS[0]) + 1, len(PROMPTS[0]) + 4)
    assert engine.run(held, other) == [alone(tmp_path, 0, GREEDY, 5), alone(tmp_path, 4, GREEDY, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["float32", "float8_e4m3fn"])
def test_more_slots_than_a_bucket(tmp_path: Path, cache_dtype: str) -> None:
    engine = mixed(tmp_path, slots=20, blocks=200, cache_dtype=cache_dtype)
    keys = engine.start_many([Start(PROMPTS[0][: 1 + n % 3], 6) for n in range(17)])
    later = engine.start_many([Start(PROMPTS[3][:n], 3) for n in (2, 7)])
    assert engine.mixed_steps == 1
    outputs = engine.run(*keys, *later)
    plain = LocalEngine(tmp_path / "model", device=DEVICE, slots=20, blocks=200, cache_dtype=cache_dtype)
    wanted = plain.start_many([Start(PROMPTS[0][: 1 + n % 3], 6) for n in range(17)])
    more = plain.start_many([Start(PROMPTS[3][:n], 3) for n in (2, 7)])
    assert outputs == plain.run(*wanted, *more)


def hundreds_of_rows(patched: pytest.MonkeyPatch, folder: Path, rows: int, count: int) -> None:
    """`count` sequences are decoded while prompts of up to `rows` tokens are computed, each in one graph."""
    size = {"slots": 40, "blocks": 60 * (rows // 16 + 2), "block_tokens": 16, "longest": rows + 64}
    engine = mixed(folder, "graphs", chunk=rows, bounds=StepBounds(rows, seconds=1e6), **size)
    prepare, replayed = PrefillGraphs.prepare, list[bool]()

    def watched(graphs: PrefillGraphs, step: StepInputs, joined: JoinedRows | None = None) -> Graph | None:
        found = prepare(graphs, step, joined)
        replayed.append(found is not None and row_count(joined) > 0)
        return found

    patched.setattr(PrefillGraphs, "prepare", watched)
    few = [Start(PROMPTS[n % 5], 40) for n in range(count)]
    many = [Start(tuple((n + i) % 90 for i in range(rows - 7 * n)), 4) for n in range(4)]
    keys = engine.start_many(few)
    replayed.clear()
    keys += [engine.start(one.prompt, max_tokens=one.max_tokens) for one in many]
    assert replayed == [True] * len(many)
    plain = LocalEngine(folder / "model", device=DEVICE, chunk=rows, **size)  # type: ignore[arg-type]
    wanted = plain.start_many(few)
    wanted += [plain.start(one.prompt, max_tokens=one.max_tokens) for one in many]
    assert engine.run(*keys) == plain.run(*wanted)


@pytest.mark.slow
def test_more_rows_of_prompts_than_of_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hundreds_of_rows(monkeypatch, tmp_path, rows=64, count=3)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [3, 30])
def test_hundreds_of_rows_in_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    hundreds_of_rows(monkeypatch, tmp_path, rows=980 - count, count=count)


@pytest.mark.parametrize(
    ("slots", "buckets"),
    [(1, [1]), (4, [4]), (16, [16]), (24, [16, 24]), (48, [16, 32, 48]), (100, [16, 32, 64, 96, 100])],
)
def test_every_number_of_slots_has_a_bucket_that_holds_them(slots: int, buckets: list[int]) -> None:
    assert mixed_batches_up_to(slots) == buckets


def test_a_step_that_joins_takes_no_other_ones_place_until_it_has_ended(tmp_path: Path) -> None:
    """Steps that are enqueued here do nothing, so that all of them stay queued."""
    engine = mixed(tmp_path)
    engine.start(PROMPTS[0], max_tokens=9)
    loop = cast(GraphDecodeLoop, engine.decode)
    loop.graphs = dict.fromkeys(loop.graphs, StepGraphs(simple=lambda: None, samples=lambda: None))
    steps, prefill = loop.steps, engine.prefill.state
    steps.typical_s, ended = 0.0, steps.ended
    rows = rows_to_mix(steps)
    assert rows is not None
    assert loop.launch_mixed(rows) is not None
    prefill.in_turn = True
    prefill.under_way.append(StepPlan())
    assert [engine.step() for _ in range(3)] == [True, False, False], "one behind the step that joined"
    steps.launched, steps.mixed_at = ended + 1, ended
    assert not engine.step(), "it has ended, the prompts' part has not: the one behind it is enough"
    prefill.under_way.clear()
    assert engine.step()
