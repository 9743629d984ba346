"""Launches of the graphs' loop and their times: none for slots that are held, the slower graph no longer than
it is needed, and a queue no deeper than a device that answers needs."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from baton.device.streams.graphs import Graph
from baton.engine.decode.graph_step import StepGraphs
from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
from baton.engine.plan.step_plan import StepPlan
from baton.engine.sequence import SamplingParams
from baton.engine.step_times import StepTimes
from tests.engine.local_engine import CONFIG, LocalEngine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = [5, 6, 7]


class Counted:
    """A graph that counts its replays, and does nothing else where it has nothing to replay."""

    def __init__(self, graph: Graph | None = None) -> None:
        self._graph = graph
        self.replays = 0

    def __call__(self) -> None:
        self.replays += 1
        if self._graph is not None:
            self._graph()


class Clock:
    """The host's, until a time is set."""

    def __init__(self) -> None:
        self.now: float | None = None

    def __call__(self) -> float:
        return time.monotonic() if self.now is None else self.now


class Case:
    """A graph engine of one slot, whose replays are counted. `stuck`: none of them does anything."""

    def __init__(self, folder: Path, *, stuck: bool = False) -> None:
        self.clock = Clock()
        self.engine = LocalEngine(folder / "model", slots=1, device=DEVICE, graph=True, clock=self.clock)
        self.loop = cast(GraphDecodeLoop, self.engine.decode)
        graphs = self.loop.graphs[1]
        self.simple = Counted(None if stuck else graphs.simple)
        self.samples = Counted(None if stuck else graphs.samples)
        self.loop.graphs = {1: StepGraphs(simple=self.simple, samples=self.samples)}

    @property
    def replays(self) -> int:
        return self.simple.replays + self.samples.replays

    def quiet(self) -> int:
        """Steps until the loop enqueues nothing more, and then a while longer; replays of that while."""
        for _ in range(50):
            self.engine.step()
            self.settle()
        before = self.replays
        for _ in range(50):
            assert not self.engine.step()
            self.settle()
        return self.replays - before

    def settle(self) -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()


def test_held_slots_are_not_replayed_until_blocks_come(tmp_path: Path) -> None:
    plain = LocalEngine(tmp_path / "model", slots=1)
    (wanted,) = plain.run(plain.start(PROMPT, max_tokens=5))
    case = Case(tmp_path)
    key = case.engine.start(PROMPT, max_tokens=5, capacity=len(PROMPT) + 1)
    assert case.quiet() == 0
    assert case.engine.output[key] == wanted[:2], "it is held where its blocks end"
    assert case.replays <= 6, "two that did something, and what was queued behind them"
    case.engine.extend(key, len(PROMPT) + 1, len(PROMPT) + 4)
    assert case.engine.run(key) == [wanted]


def test_slots_that_wait_for_a_mask_are_not_replayed_until_it_is_written(tmp_path: Path) -> None:
    case = Case(tmp_path)
    key = case.engine.start(PROMPT, max_tokens=3, masked=True)
    mask = np.zeros(-(-int(CONFIG["vocab_size"]) // 32), dtype=np.uint32)
    for number, token in enumerate((40, 41)):
        assert case.quiet() == 0
        assert len(case.engine.output[key]) == 1 + number
        mask[:] = 0
        mask[token // 32] = 1 << token % 32
        case.loop.write_masks([(*key, len(PROMPT) + 1 + number, mask)])
    assert case.engine.run(key)[0][1:] == [40, 41]


def test_min_tokens_want_the_full_sampler_only_until_they_are_there(tmp_path: Path) -> None:
    case = Case(tmp_path)
    key = case.engine.start(PROMPT, max_tokens=16, min_tokens=4, stop=(96,))
    while len(case.engine.output[key]) < 8:
        case.engine.step()
    before = case.samples.replays
    case.engine.run(key)
    assert len(case.engine.output[key]) == 16
    assert case.samples.replays == before <= 12
    assert case.simple.replays >= 6


def test_a_device_that_ends_no_replay_is_hung_after_two_seconds(tmp_path: Path) -> None:
    case = Case(tmp_path, stuck=True)
    case.clock.now = now = time.monotonic()
    assert not case.loop.device_hung()
    case.engine.start(PROMPT, max_tokens=5)
    case.loop.times = StepTimes()
    case.loop.steps.typical_s = 0.0
    while case.clock.now < now + 10 and not case.loop.device_hung():
        case.engine.step()
        case.clock.now += 0.01
    assert 2.0 < case.clock.now - now < 2.1
    assert case.replays == 2, "nothing more is queued behind a replay that never ends"


def test_a_device_that_works_or_idles_is_not_hung(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.clock.now = time.monotonic()
    key = case.engine.start(PROMPT, max_tokens=6)
    while key not in case.engine.finish:
        case.engine.step()
        case.settle()
        case.clock.now += 0.5
        assert not case.loop.device_hung()
    for _ in range(20):
        case.clock.now += 0.5
        assert not case.loop.device_hung()


def test_short_steps_are_queued_one_deeper_and_looked_at_more_often(tmp_path: Path) -> None:
    case = Case(tmp_path, stuck=True)
    case.engine.start(PROMPT, max_tokens=5, sampling=SamplingParams())
    case.clock.now = time.monotonic()
    for step_s, depth in ((0.0, 2), (0.0004, 3), (0.0019, 3), (0.0021, 2), (0.02, 2)):
        case.loop.steps.launched = case.loop.steps.ended
        case.loop.times = StepTimes()
        case.loop.times.add(step_s)
        case.loop.steps.typical_s = step_s
        steps = [case.engine.step() for _ in range(5)]
        assert steps == [True] * depth + [False] * (5 - depth), f"steps of {step_s} s"
        assert case.loop.nap_s == (min(0.001, step_s / 4) or 0.001)


def test_the_host_looks_again_soon_where_a_step_should_end(tmp_path: Path) -> None:
    case = Case(tmp_path, stuck=True)
    case.engine.start(PROMPT, max_tokens=5)
    case.clock.now = began = time.monotonic()
    assert case.engine.step()
    case.loop.times = StepTimes()
    case.loop.times.add(0.008)
    naps = {}
    for after_us in (0, 6000, 6600, 7100, 8000, 8900, 9100, 20_000):
        case.clock.now = began + after_us / 1e6
        naps[after_us] = round(case.loop.nap_s * 1e6)
    assert naps == {
        0: 1000, 6000: 1000, 6600: 400, 7100: 100, 8000: 100, 8900: 100, 9100: 1000, 20_000: 1000
    }  # fmt: skip


def test_a_prefill_step_takes_the_place_of_one_that_is_queued(tmp_path: Path) -> None:
    case = Case(tmp_path, stuck=True)
    case.engine.start(PROMPT, max_tokens=5)
    for under_way, depth in ((True, 1), (False, 2), (True, 1)):
        case.loop.steps.launched = case.loop.steps.ended
        case.loop.steps.typical_s = 0.0
        prefill = case.engine.prefill.state
        prefill.in_turn, prefill.under_way = True, deque([StepPlan()] * under_way)
        assert [case.engine.step() for _ in range(4)] == [True] * depth + [False] * (4 - depth)


@pytest.mark.slow
def test_steps_that_are_timed_at_a_start_leave_no_trace(tmp_path: Path) -> None:
    plain = LocalEngine(tmp_path / "model", slots=4)
    (wanted,) = plain.run(plain.start(PROMPT, max_tokens=4))
    engine = LocalEngine(tmp_path / "model", slots=4, device=DEVICE, graph=True)
    loop = cast(GraphDecodeLoop, engine.decode)
    costs = loop.measure_costs(engine.cache)
    loop.observe()
    assert min(costs.decode_step_s, costs.decode_context_token_s) > 0
    assert list(costs.decode_curve.values) == sorted(costs.decode_curve.values)
    assert not engine.step(), "nothing is active"
    assert engine.run(engine.start(PROMPT, max_tokens=4)) == [wanted]
