"""Sequences of plans, drawn by the planner over random arrivals: whichever executor they are launched by,
tokens, slots and blocks are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.executor.plan_traces import Arrives, Launches, Player, alone, draw_trace, play

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


# Prompts alone, decode steps alone, both in one launch.
EVERY_KIND = {(True, False), (False, True), (True, True)}


def check(folder: Path, seed: int, first: Player, second: Player) -> set[tuple[bool, bool]]:
    """A sequence of plans by the reference and by another executor → which kinds of plans it had."""
    trace = draw_trace(first, seed)
    for event in trace:
        if isinstance(event, Arrives) and event.number in first.outcome.tokens:
            assert first.outcome.tokens[event.number] == alone(folder, DEVICE, event.request)
    play(second, trace)
    assert second.outcome == first.outcome
    for player in (first, second):
        player.restart()
    return {(bool(e.chunks), e.decode is not None) for e in trace if isinstance(e, Launches)}


def check_many(folder: Path, seeds: range) -> None:
    kinds = [check(folder, seed, Player(folder, DEVICE), Player(folder, DEVICE)) for seed in seeds]
    assert set.union(*kinds) == EVERY_KIND


def test_plans_launched_by_hand_do_what_they_did_for_the_planner(folder: Path) -> None:
    check_many(folder, range(6))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_plans_launched_by_hand_do_what_they_did_for_the_planner_at_full_size(
    folder: Path, first: int
) -> None:
    check_many(folder, range(first, first + 50))


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="Triton does not interpret beside a GPU")
@pytest.mark.parametrize("seed", range(6))
def test_the_executor_of_graphs_does_the_same_in_the_interpreter(folder: Path, seed: int) -> None:
    check(folder, seed, Player(folder, DEVICE), Player(folder, DEVICE, graph=True, mixed="eager"))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(0, 200, 50))
def test_the_executor_of_graphs_does_the_same_on_a_gpu(folder: Path, seed: int) -> None:
    """One after the other on two engines, whose slots and blocks are in the same order all the time."""
    first, second = Player(folder, DEVICE), Player(folder, DEVICE, graph=True, mixed="graphs")
    kinds = [check(folder, each, first, second) for each in range(seed, seed + 50)]
    assert set.union(*kinds) == EVERY_KIND
    print(f"\nPROOF plans on a GPU: {len(kinds)} sequences, tokens, slots and blocks as by the reference")
