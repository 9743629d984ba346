"""Limits of the time to the first token in the prefill scheduler, in virtual time: what is met by the order
and the length of steps, and how much less where prompts run in turn."""

from __future__ import annotations

import math

import pytest

from baton.engine.plan import prefill_scheduler
from baton.engine.plan.prompt_order import Prompt
from baton.engine.sequence import Sequence
from tests.bench.prefill.limited_prompts import BOUNDS, Arrival, InTurn, in_time, poisson, serve


def shortest_first(prompts: list[Prompt], step_s: float, share: float = 1.0) -> list[Sequence]:
    return [one.sequence for one in prompts]


def test_tight_limits_are_met_though_shorter_prompts_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 tokens take 53 ms and are due after 250; 50 short prompts a second, which have time, keep the
    worker busy."""
    arrivals = poisson(50, 8, 500, limit_s=3.0, seed=1) + poisson(4, 8, 2048, limit_s=0.25, seed=2)
    served = serve(arrivals)
    assert in_time(served, 500) == 1
    assert in_time(served, 2048) >= 0.9
    assert in_time(serve(arrivals, InTurn), 2048) < 0.6
    monkeypatch.setattr(prefill_scheduler, "in_order", shortest_first)
    assert in_time(serve(arrivals), 2048) < 0.75


def test_steps_are_long_while_limits_allow() -> None:
    """Short prompts that are due after half a second leave long ones steps of 60 ms, so that more of those
    are in time than beside short prompts without limits, each of which may be in a hurry."""
    long = poisson(1.2, 12, 8192, limit_s=0.8, seed=2)
    patient, hurried = (long + poisson(40, 12, 500, limit_s, seed=1) for limit_s in (0.5, math.inf))
    served = serve(patient)
    assert in_time(served, 500) == 1
    assert in_time(served, 8192) >= 0.9
    assert in_time(serve(hurried), 8192) < 0.7
    assert in_time(serve(patient, InTurn), 8192) < 0.7


def test_a_limit_that_cannot_be_met_starves_none_and_is_not_starved() -> None:
    """A prompt of 220 ms that is due after 100, while more short ones come than the worker can compute. It
    gets an eighth of the time once it has waited for two seconds."""
    hopeless = Arrival(0.1, 8192, limit_s=0.1)
    arrivals = [hopeless, *poisson(90, 6, 500, limit_s=0.5, seed=1)]
    served = serve(arrivals)
    assert BOUNDS.age_cap_s < served[hopeless] < BOUNDS.age_cap_s + 12 * 0.25
    assert in_time(served, 500) >= 0.85
    in_turn = serve(arrivals, InTurn)
    assert in_turn[hopeless] > 6
    assert in_time(in_turn, 500) < 0.5
