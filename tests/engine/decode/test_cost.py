"""The fit of step times to sequences and contexts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.decode.cost import DecodeCost, DecodeRates


@given(
    step=st.floats(1e-3, 0.05),
    sequence=st.floats(0, 2e-4),
    context=st.floats(0, 1e-7),
    seed=st.integers(0, 100),
)
def test_costs_that_varied_are_separated(step: float, sequence: float, context: float, seed: int) -> None:
    draw, cost, truth = random.Random(seed), DecodeCost(), DecodeRates(step, sequence, context)
    for _ in range(200):
        sequences = draw.randint(1, 128)
        tokens = sequences * draw.randint(100, 8000)
        cost.observe(sequences, tokens, truth.seconds(sequences, tokens) * draw.uniform(0.99, 1.01))
    found = cost.rates()
    assert min(found) >= 0
    for sequences, tokens in ((1, 1000), (64, 64 * 1200), (128, 128 * 4000)):
        wanted = truth.seconds(sequences, tokens)
        assert found.seconds(sequences, tokens) == pytest.approx(wanted, rel=0.03)


def test_a_load_that_never_varied_predicts_itself() -> None:
    cost = DecodeCost()
    assert cost.rates().seconds(10, 1000) == 0
    for _ in range(30):
        cost.observe(32, 32 * 1100, 0.007)
    assert cost.rates().seconds(32, 32 * 1100) == pytest.approx(0.007, rel=0.01)


def test_what_is_measured_late_counts_most() -> None:
    cost, draw = DecodeCost(), random.Random(0)
    for pace in (2.0, 1.0):
        for _ in range(300):
            sequences = draw.randint(1, 64)
            cost.observe(sequences, 0, pace * (0.005 + sequences * 5e-5))
    assert cost.rates().seconds(40, 0) == pytest.approx(0.007, rel=0.02)
