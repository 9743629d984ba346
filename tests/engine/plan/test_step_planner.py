"""Plans change nothing, and are the same when asked for twice; launching them is what counts."""

from __future__ import annotations

import copy
import random
from typing import Any

from baton.engine.memory.block_pools import BlockPools
from baton.engine.plan.decode_state import DecodeState
from baton.engine.plan.pacing import PrefillPacing
from baton.engine.plan.prefill_scheduler import PrefillScheduler, StepBounds
from baton.engine.plan.prefill_state import PrefillState
from baton.engine.plan.step_plan import DecodeRows, StepPlan
from baton.engine.plan.step_planner import StepPlanner
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.engine.shared_memory.step_shape import StepShape
from baton.model_spec.layout import CacheGroup, Layout, Plane
from baton.perf_model.prefill_fit import PrefillFit

LAYOUT = Layout((CacheGroup((0,), (Plane("k", "float32", 1, 4),), block_tokens=4),))


class Planned:
    """A planner whose steps nothing runs: the test says what has ended."""

    def __init__(self, blocks: int = 200, limit_s: float = 0.02) -> None:
        self.now = 0.0
        cost = PrefillFit()
        cost.took([(0, 1)], 0.0001)
        self.pools = BlockPools(LAYOUT, [blocks])
        bounds = StepBounds(100, age_cap_s=0.5)
        self.prompts = PrefillScheduler(
            self.pools, bounds, max_sequences=50, cost=cost, clock=lambda: self.now
        )
        self.prefill = PrefillState(in_turn=True)
        self.decode = DecodeState(StepShape(8), (1, 2, 4, 8), (4, 8))
        self.pacing = PrefillPacing(lambda: limit_s)
        self.planner = StepPlanner(
            self.prompts, self.prefill, self.decode, self.pacing, lambda: 0.004, lambda: self.now
        )

    def add(self, length: int, limit_s: float = float("inf")) -> Sequence:
        one = Sequence(tuple(range(length)), length, SamplingParams(), Limits(4), first_token_in_s=limit_s)
        self.prompts.add(one)
        return one

    def snapshot(self) -> dict[str, Any]:
        """All of the host's state, as values."""
        return {
            "planner": {name: value for name, value in vars(self.planner).items() if _is_value(value)},
            "prompts": {
                name: dict(value) if isinstance(value, dict) else value
                for name, value in vars(self.prompts).items()
                if _is_value(value) or isinstance(value, dict)
            },
            "waiting": {
                id(one): (one.computed, one.begun, one.cached, one.prefix_taken, copy.deepcopy(one.blocks))
                for one in self.prompts.sequences
            },
            "pacing": {name: value for name, value in vars(self.pacing).items() if _is_value(value)},
            "blocks": (self.pools.free, self.pools.pinned, self.pools.available()),
            "prefill": repr(self.prefill),
            "decode": repr(self.decode),
        }


def _is_value(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, tuple))


def test_a_plan_that_is_asked_for_twice_is_the_same_and_changes_nothing() -> None:
    kinds: set[tuple[bool, bool]] = set()
    for seed in range(40):
        draw = random.Random(seed)
        planned = Planned(blocks=draw.choice((40, 200)), limit_s=draw.choice((0.004, 0.02, float("inf"))))
        for _ in range(60):
            step(planned, draw)
            before = planned.snapshot()
            one, other = planned.planner.plan(planned.now), planned.planner.plan(planned.now)
            assert one == other
            assert planned.snapshot() == before
            if one is None:
                continue
            kinds.add((bool(one.chunks), one.decode is not None))
            if draw.random() < 0.8:
                launch(planned, one)
    assert kinds == {(True, False), (False, True), (True, True)}


def step(planned: Planned, draw: random.Random) -> None:
    """Applies one event: time passes, prompts come and go, steps end, slots are taken."""
    planned.now += draw.random() * 0.01
    if draw.random() < 0.4 and len(planned.prompts.sequences) < 40:
        planned.add(draw.randint(1, 140), draw.choice((0.05, 1.0, float("inf"))))
    if draw.random() < 0.05 and planned.prompts.sequences:
        planned.prompts.remove(draw.choice(planned.prompts.sequences))
    if draw.random() < 0.5:
        end_prefill(planned)
    decode = planned.decode
    active = draw.randint(0, 6)
    ended = draw.randint(decode.ended, decode.launched)
    decode.saw(active=active, features=0, applied=decode.posted, ended=ended, moves=active > 0)
    decode.arriving = range(draw.randint(0, 2))
    planned.planner.look(planned.now, ended, decoding=active > 0)
    planned.planner.observe(planned.now)


def launch(planned: Planned, plan: StepPlan) -> None:
    if plan.decode is not None:
        planned.decode.launched += 1
    if plan.is_mixed:
        planned.decode.mixed_at = planned.decode.launched
    if plan.chunks:
        planned.prefill.under_way.append(plan)
        planned.prefill.ends_at = planned.now + plan.expected_s
    planned.planner.launched(plan, planned.now)


def end_prefill(planned: Planned) -> None:
    """All chunks that were launched have ended."""
    planned.prefill.under_way.clear()
    for one in planned.prompts.sequences:
        if one.begun > one.computed:
            one.computed = one.begun
        if one.computed == one.length:
            planned.prompts.remove(one)


def test_prompts_are_planned_first_and_decode_steps_behind_them() -> None:
    planned = Planned()
    planned.decode.mixed_batches = ()
    planned.decode.saw(active=3, features=0, applied=0, ended=0, moves=True)
    prompt = planned.add(150)
    planned.planner.look(0.0, 0, decoding=True)
    assert planned.planner.plan(0.0) == StepPlan(decode=DecodeRows(4), reason="slots advance"), (
        "no blocks yet"
    )
    planned.planner.observe(0.0)
    first = planned.planner.plan(0.0)
    assert first is not None
    assert (first.runs, first.decode, first.more_waits) == ([(0, 100)], None, True)
    assert prompt.reached == 0
    launch(planned, first)
    assert prompt.reached == 100
    second = planned.planner.plan(0.001)
    assert second is not None
    assert second.decode == DecodeRows(4)
    launch(planned, second)
    assert planned.planner.plan(0.002) is None, "the prefill step has the other place"


def test_blocks_are_taken_when_a_step_is_due_and_not_before() -> None:
    planned = Planned()
    first, second = planned.add(50), planned.add(60)
    planned.planner.observe(0.0)
    assert first.blocks is not None
    launch(planned, planned.planner.plan(0.0) or StepPlan())
    third = planned.add(10)
    planned.planner.look(0.0, 0, decoding=True)
    planned.planner.observe(0.001)
    assert second.blocks is not None, "it came before"
    assert third.blocks is None, "the next step is due when the one that runs has ended"
    end_prefill(planned)
    planned.planner.observe(0.02)
    assert third.blocks is not None
