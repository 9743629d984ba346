"""Sequences of plans, drawn by the planner over random arrivals: whichever executor they are launched by,
tokens, slots and blocks are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.engine.executor.plan_traces import Arrives, Launches, Player, alone, draw_trace, play

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


def check(
    folder: Path, seed: int, *, graph: bool = False, mixed: Literal["", "graphs", "eager"] = ""
) -> set[tuple[bool, bool]]:
    """A sequence of plans by the reference and by another executor → which kinds of plans it had."""
    first = Player(folder, DEVICE)
    trace = draw_trace(first, seed)
    first.check_free()
    for event in trace:
        if isinstance(event, Arrives) and event.number in first.outcome.tokens:
            assert first.outcome.tokens[event.number] == alone(folder, DEVICE, event.request)
    second = Player(folder, DEVICE, graph=graph, mixed=mixed)
    play(second, trace)
    second.check_free()
    assert second.outcome == first.outcome
    return {(bool(e.chunks), e.decode is not None) for e in trace if isinstance(e, Launches)}


def check_many(folder: Path, seeds: range) -> None:
    kinds = [check(folder, seed) for seed in seeds]
    assert set.union(*kinds) == {(True, False), (False, True), (True, True)}


def test_plans_launched_by_hand_do_what_they_did_for_the_planner(folder: Path) -> None:
    check_many(folder, range(50))


@pytest.mark.slow
def test_plans_launched_by_hand_do_what_they_did_for_the_planner_at_full_size(folder: Path) -> None:
    check_many(folder, range(50, 500))


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="Triton does not interpret beside a GPU")
@pytest.mark.parametrize("seed", range(6))
def test_the_executor_of_graphs_does_the_same_in_the_interpreter(folder: Path, seed: int) -> None:
    check(folder, seed, graph=True, mixed="eager")


@pytest.mark.gpu
def test_the_executor_of_graphs_does_the_same_on_a_gpu(folder: Path) -> None:
    kinds = [check(folder, seed, graph=True, mixed="graphs") for seed in range(200)]
    assert set.union(*kinds) == {(True, False), (False, True), (True, True)}
    print(f"\nPROOF plans on a GPU: {len(kinds)} sequences, tokens, slots and blocks as by the reference")
