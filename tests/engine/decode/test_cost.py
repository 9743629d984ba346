"""The fit of step times to sequences and contexts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.decode.cost import DecodeCost, DecodeRates, StepCurve


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
    assert min(found[:3]) >= 0
    for sequences, tokens in ((1, 1000), (64, 64 * 1200), (128, 128 * 4000)):
        wanted = truth.seconds(sequences, tokens)
        assert found.seconds(sequences, tokens) == pytest.approx(wanted, rel=0.03)


def test_a_load_that_never_varied_predicts_itself() -> None:
    cost = DecodeCost()
    assert cost.rates().seconds(10, 1000) == 0
    for _ in range(30):
        cost.observe(32, 32 * 1100, 0.007)
    assert cost.rates().seconds(32, 32 * 1100) == pytest.approx(0.007, rel=0.01)


READING = 3e-8


def test_what_a_token_of_context_takes_is_as_measured_at_the_start_until_the_load_has_varied() -> None:
    """A load of about 70 sequences for a minute, of which each makes a step longer by 33 µs."""
    truth = DecodeRates(0.0045, 0.0, READING)
    for expected, least, most in ((READING, 0.92, 1.08), (0.0, 0.0, 0.9)):
        cost, draw = DecodeCost(StepCurve((1.0,), (0.004,), expected)), random.Random(1)
        for _ in range(60):
            sequences = draw.randint(69, 71)
            seconds = truth.seconds(sequences, 1100 * sequences) * draw.uniform(0.99, 1.01)
            cost.observe(sequences, 1100 * sequences, seconds)
        more = cost.rates().seconds(80, 1100 * 80) - cost.rates().seconds(70, 1100 * 70)
        assert least <= more / (truth.seconds(80, 1100 * 80) - truth.seconds(70, 1100 * 70)) <= most


def test_what_is_measured_while_the_load_varies_counts_more_than_what_was_at_the_start() -> None:
    truth, draw = DecodeRates(0.004, 0.0, READING), random.Random(1)
    cost = DecodeCost(StepCurve((1.0,), (0.004,), 3 * READING))
    assert cost.rates().seconds(10, 10_000) == pytest.approx(0.004 + 3 * READING * 10_000)
    for _ in range(100):
        sequences = draw.randint(1, 100)
        tokens = sequences * draw.randint(500, 2000)
        cost.observe(sequences, tokens, truth.seconds(sequences, tokens) * draw.uniform(0.99, 1.01))
    assert cost.rates().seconds(100, 150_000) == pytest.approx(truth.seconds(100, 150_000), rel=0.02)


def test_steps_that_were_delayed_say_nothing_and_a_slower_device_is_known_soon() -> None:
    truth = DecodeRates(0.004, 0.0, READING)
    cost = DecodeCost(StepCurve((1.0,), (0.004,), READING))
    for _ in range(8):
        cost.observe(8, 8000, 0.02)
    for sequences in (8, 30, 60, 70):
        cost.observe(sequences, 1000 * sequences, truth.seconds(sequences, 1000 * sequences))
    assert cost.rates().seconds(80, 80_000) == pytest.approx(truth.seconds(80, 80_000), rel=0.001)
    cost.observe(70, 70_000, 0.2 * truth.seconds(70, 70_000))
    assert cost.rates().seconds(80, 80_000) == pytest.approx(truth.seconds(80, 80_000), rel=0.001)
    for _ in range(12):
        cost.observe(70, 70_000, 1.5 * truth.seconds(70, 70_000))
    assert cost.rates().seconds(70, 70_000) >= 1.25 * truth.seconds(70, 70_000)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_load_that_is_slower_than_was_measured_is_known_however_short_it_is(count: int) -> None:
    def truth(sequences: int) -> float:
        return (1.2 if sequences > 32 else 1.0) * DecodeRates(0.004, 0.0, READING).seconds(
            sequences, 1000 * sequences
        )

    cost = DecodeCost(StepCurve((1.0,), (0.004,), READING))
    for _ in range(40):
        for sequences in [*range(8, 8 + count), *range(64, 64 + count)]:
            cost.observe(sequences, 1000 * sequences, truth(sequences))
    assert cost.rates().seconds(64, 64_000) == pytest.approx(truth(64), rel=0.03)


def test_what_is_measured_late_counts_most() -> None:
    cost, draw = DecodeCost(), random.Random(0)
    for pace in (2.0, 1.0):
        for _ in range(300):
            sequences = draw.randint(1, 64)
            cost.observe(sequences, 0, pace * (0.005 + sequences * 5e-5))
    assert cost.rates().seconds(40, 0) == pytest.approx(0.007, rel=0.02)


BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128)
CURVE = StepCurve.of_batches(BATCHES, [0.004 + batch * 2e-5 for batch in BATCHES])


def test_a_curve_is_flat_up_to_a_full_batch_but_for_its_last_sequences() -> None:
    assert CURVE.first_s == pytest.approx(0.004 + 2e-5)
    for sequences, batch in ((33, 64), (60, 64), (65, 96), (92, 96), (128, 128), (200, 128)):
        assert CURVE.first_s * CURVE.times(sequences) == pytest.approx(0.004 + batch * 2e-5), sequences
    assert CURVE.times(62) < CURVE.times(63) < CURVE.times(65)


def test_a_batch_that_takes_no_longer_than_a_smaller_one_adds_nothing() -> None:
    curve = StepCurve.of_batches((1, 2, 4, 8), (0.004, 0.0039, 0.004, 0.005))
    assert curve.times(3) == 1
    assert curve.times(8) == 1.25
    assert list(curve.sequences) == sorted(set(curve.sequences))


def test_steps_are_predicted_by_their_curve_before_any_was_measured() -> None:
    rates = DecodeCost(CURVE).rates()
    assert rates.seconds(80, 80_000) == pytest.approx(0.004 + 96 * 2e-5)


@pytest.mark.parametrize("pace", [0.9, 1.1])
def test_what_a_curve_does_not_know_is_fitted(pace: float) -> None:
    """Steps are of padded batches, take 10 % less or more than at the start, and read their contexts."""
    cost, draw = DecodeCost(CURVE), random.Random(0)

    def truth(sequences: int, context: int) -> float:
        return pace * CURVE.first_s * CURVE.times(sequences) + context * 3e-8

    for _ in range(200):
        sequences = draw.randint(1, 128)
        tokens = sequences * draw.randint(100, 2000)
        cost.observe(sequences, tokens, truth(sequences, tokens))
    rates = cost.rates()
    for sequences in (10, 60, 66, 90, 97):
        tokens = sequences * 1000
        assert rates.seconds(sequences, tokens) == pytest.approx(truth(sequences, tokens), rel=0.02)
