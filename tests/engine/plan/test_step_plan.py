"""Plans as data: frozen, equal where they say the same, and one line for a reader."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from baton.engine.plan.step_plan import Chunk, DecodeRows, StepPlan, decode_alone
from baton.engine.sequence import Limits, SamplingParams, Sequence


def sequence(length: int) -> Sequence:
    return Sequence(tuple(range(length)), length, SamplingParams(), Limits(4))


def test_a_plan_is_a_line() -> None:
    long, short = sequence(4000), sequence(7)
    chunks = Chunk(short, 0, 7), Chunk(long, 512, 505)
    both = StepPlan(chunks, DecodeRows(32), "prompts wait", expected_s=0.0123, decode_s=0.005)
    assert str(both) == (
        "prefill 512 rows (0+7 of 7, 512+505 of 4000) + decode batch 32 (simple sampler), 12.30 ms: "
        "prompts wait"
    )
    assert str(decode_alone(DecodeRows(8, simple=False), "slots advance")) == (
        "decode batch 8 (full sampler): slots advance"
    )
    assert str(decode_alone(DecodeRows(64, drafts=True), "slots advance")) == (
        "decode batch 64 with drafts (simple sampler): slots advance"
    )
    assert (both.runs, both.is_mixed) == ([(0, 7), (512, 505)], True)
    assert not StepPlan(chunks).is_mixed


def test_plans_are_compared_by_what_they_say() -> None:
    one, other = sequence(9), sequence(9)
    assert StepPlan((Chunk(one, 0, 9),), reason="a") == StepPlan((Chunk(one, 0, 9),), reason="a")
    assert StepPlan((Chunk(one, 0, 9),)) != StepPlan((Chunk(other, 0, 9),)), "another prompt of these tokens"
    assert StepPlan(decode=DecodeRows(4)) != StepPlan(decode=DecodeRows(4, simple=False))
    with pytest.raises(FrozenInstanceError):
        StepPlan().reason = "b"  # type: ignore[misc]


def test_a_decode_steps_plan_is_made_once() -> None:
    assert decode_alone(DecodeRows(64), "slots advance") is decode_alone(DecodeRows(64), "slots advance")
