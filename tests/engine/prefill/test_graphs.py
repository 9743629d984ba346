"""Prefill steps as graphs: a replay computes bitwise what single launches do. On a CPU a replay runs the
captured launches again in Triton's interpreter, from the inputs where a graph has them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.device.streams.graphs import Recorder
from baton.engine.prefill.attention_plan import KeySplit
from baton.engine.prefill.graphs import GraphBounds
from baton.perf_model.row_times import RowTimes
from tests.engine.graph_twins import GraphTwins
from tests.engine.prompt_passes import SMALL_RULE, SMALL_SPLIT, SMALL_TUNING

BOUNDS = GraphBounds(rows=128, least_chunks=3, rows_a_chunk=64, entries=512)


def twins(folder: Path, family: str = "llama", **options: Any) -> GraphTwins:
    given = {
        "lengths": (128, 40, 128, 20),
        "most_rows": 64,
        "block_tokens": 4,
        "tuning": SMALL_TUNING,
        "split": SMALL_SPLIT,
        "bounds": BOUNDS,
    }
    return GraphTwins(folder, family, **{**given, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", "biases and a tied head", "query and key norm", "windows", "mixture"]
)
def test_a_graph_is_what_it_would_launch(tmp_path: Path, family: str) -> None:
    made = twins(tmp_path, family, layers=2 if family == "windows" else 1)
    made.check([(0, 0, 60), (1, 0, 3)])
    made.check([(1, 3, 7), (0, 60, 5), (2, 0, 3)])  # keys are shared among programs
    made.check([(0, 65, 63)])
    assert made.replayed == made.steps


def test_rows_are_padded_to_a_number_that_products_are_fast_with(tmp_path: Path) -> None:
    fast = RowTimes.of({64: 1.0, 128: 1.0, 192: 2.0})
    made = twins(tmp_path, layers=1, most_rows=130, row_times=fast)
    assert made.graphed.graphs.sizes == [(128, 0)]
    made.check([(0, 0, 60), (1, 0, 3)])
    assert made.replayed == made.steps == 1


def test_products_are_timed_with_every_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = twins(tmp_path, layers=1, most_rows=130).eager
    timed: dict[int, float] = {}
    of = RowTimes.of

    def kept(seconds: dict[int, float]) -> RowTimes:
        timed.update(seconds)
        return of(seconds)

    monkeypatch.setattr(RowTimes, "of", kept)
    made.measure_products()
    assert set(timed) == {64, 128, 192}
    assert set(made.row_times.rows) <= {64, 128, 192}
    assert made.row_times.padded(130) == 192


def test_without_memory_for_graphs_products_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(recorder: Recorder, launch: Callable[[], None]) -> None:
        raise RuntimeError("out of memory")

    made = twins(tmp_path, layers=1, most_rows=130).eager
    monkeypatch.setattr(Recorder, "capture", refuses)
    made.measure_products()
    assert made.row_times == RowTimes()


@pytest.mark.slow
def test_random_packings(tmp_path: Path) -> None:
    draw = random.Random(6)
    made = twins(tmp_path, "windows", lengths=(70, 70, 100, 100), layers=2)
    for rows in (63, 2, 64):
        made.check(made.packing(draw, rows, draw.randint(1, 4)))
    assert made.replayed == made.steps


@pytest.mark.slow
def test_a_step_that_exceeds_its_graph_is_launched_eagerly(tmp_path: Path) -> None:
    few = GraphBounds(rows=64, least_chunks=1, rows_a_chunk=64, entries=60)
    split = KeySplit(programs=3, least_keys=1000)
    made = twins(tmp_path, layers=1, most_rows=70, bounds=few, split=split, tuning=None)
    made.check([(0, 0, 64)])
    assert made.replayed == 1
    made.check([(0, 64, 60), (1, 0, 5)])  # 65 rows
    made.check([(3, n, 1) for n in range(20)])  # 20 items
    made.check([(0, 100, 1), (2, 0, 1)])  # tables of 32 entries each, and the scratch line
    assert made.replayed == 1
    made.check([(1, 0, 5), (3, 0, 5)])
    assert made.replayed == 2


@pytest.mark.slow
def test_what_the_library_takes_is_no_graph(tmp_path: Path) -> None:
    made = twins(tmp_path, layers=1, rule=SMALL_RULE)
    made.check([(0, 0, 40)])
    assert made.replayed == 0
    made.check([(0, 40, 5), (3, 0, 3)])
    assert made.replayed == 1


def test_capturing_writes_scratch_alone(tmp_path: Path) -> None:
    made = twins(tmp_path, layers=1)
    assert all(not group[1:].any() for group in made.caches[1].groups)


def test_without_memory_for_graphs_steps_are_launched_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = twins(tmp_path, layers=1)

    def capture(self: Recorder, launch: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Recorder, "capture", capture)
    assert made.graphed.graph_rows == 128
    made.graphed.capture(BOUNDS)
    assert (made.graphed.uncaptured, made.graphed.graph_rows) == ("CUDA out of memory", 0)
    made.check([(0, 0, 5)])
    assert made.replayed == 0
