"""The fit of step times to sequences and contexts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.perf_model.decode_fit import DecodeFit
from baton.perf_model.step_costs import StepCosts


def decode_costs(step: float, sequence: float, context: float) -> StepCosts:
    return StepCosts(decode_step_s=step, decode_sequence_s=sequence, decode_context_token_s=context)


@settings(max_examples=25)
@given(
    step=st.floats(1e-3, 0.05),
    sequence=st.floats(0, 2e-4),
    context=st.floats(0, 1e-7),
    seed=st.integers(0, 100),
)
def test_costs_that_varied_are_separated(step: float, sequence: float, context: float, seed: int) -> None:
    draw, fit, truth = random.Random(seed), DecodeFit(), decode_costs(step, sequence, context)
    for _ in range(200):
        sequences = draw.randint(1, 128)
        tokens = sequences * draw.randint(100, 8000)
        fit.observe(sequences, tokens, truth.decode_s(sequences, tokens) * draw.uniform(0.99, 1.01))
    found = fit.costs
    assert min(found.decode_step_s, found.decode_sequence_s, found.decode_context_token_s) >= 0
    for sequences, tokens in ((1, 1000), (64, 64 * 1200), (128, 128 * 4000)):
        wanted = truth.decode_s(sequences, tokens)
        assert found.decode_s(sequences, tokens) == pytest.approx(wanted, rel=0.03)


def test_a_load_that_never_varied_predicts_itself() -> None:
    fit = DecodeFit()
    assert fit.costs.decode_s(10, 1000) == 0
    for _ in range(30):
        fit.observe(32, 32 * 1100, 0.007)
    assert fit.costs.decode_s(32, 32 * 1100) == pytest.approx(0.007, rel=0.01)


READING = 3e-8


def test_what_a_token_of_context_takes_is_as_measured_at_the_start_until_the_load_has_varied() -> None:
    """A load of about 70 sequences for a minute, of which each makes a step longer by 33 µs."""
    truth = decode_costs(0.0045, 0.0, READING)
    for expected, least, most in ((READING, 0.92, 1.08), (0.0, 0.0, 0.9)):
        fit, draw = DecodeFit(decode_costs(0.004, 0.0, expected)), random.Random(1)
        for _ in range(60):
            sequences = draw.randint(69, 71)
            seconds = truth.decode_s(sequences, 1100 * sequences) * draw.uniform(0.99, 1.01)
            fit.observe(sequences, 1100 * sequences, seconds)
        more = fit.costs.decode_s(80, 1100 * 80) - fit.costs.decode_s(70, 1100 * 70)
        assert least <= more / (truth.decode_s(80, 1100 * 80) - truth.decode_s(70, 1100 * 70)) <= most


def test_what_is_measured_while_the_load_varies_counts_more_than_what_was_at_the_start() -> None:
    truth, draw = decode_costs(0.004, 0.0, READING), random.Random(1)
    fit = DecodeFit(decode_costs(0.004, 0.0, 3 * READING))
    assert fit.costs.decode_s(10, 10_000) == pytest.approx(0.004 + 3 * READING * 10_000)
    for _ in range(100):
        sequences = draw.randint(1, 100)
        tokens = sequences * draw.randint(500, 2000)
        fit.observe(sequences, tokens, truth.decode_s(sequences, tokens) * draw.uniform(0.99, 1.01))
    assert fit.costs.decode_s(100, 150_000) == pytest.approx(truth.decode_s(100, 150_000), rel=0.02)


def test_steps_that_were_delayed_say_nothing_and_a_slower_device_is_known_soon() -> None:
    truth = decode_costs(0.004, 0.0, READING)
    fit = DecodeFit(decode_costs(0.004, 0.0, READING))
    for _ in range(8):
        fit.observe(8, 8000, 0.02)
    for sequences in (8, 30, 60, 70):
        fit.observe(sequences, 1000 * sequences, truth.decode_s(sequences, 1000 * sequences))
    assert fit.costs.decode_s(80, 80_000) == pytest.approx(truth.decode_s(80, 80_000), rel=0.001)
    fit.observe(70, 70_000, 0.2 * truth.decode_s(70, 70_000))
    assert fit.costs.decode_s(80, 80_000) == pytest.approx(truth.decode_s(80, 80_000), rel=0.001)
    for _ in range(12):
        fit.observe(70, 70_000, 1.5 * truth.decode_s(70, 70_000))
    assert fit.costs.decode_s(70, 70_000) >= 1.25 * truth.decode_s(70, 70_000)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_load_that_is_slower_than_was_measured_is_known_however_short_it_is(count: int) -> None:
    def truth(sequences: int) -> float:
        return (1.2 if sequences > 32 else 1.0) * decode_costs(0.004, 0.0, READING).decode_s(
            sequences, 1000 * sequences
        )

    fit = DecodeFit(decode_costs(0.004, 0.0, READING))
    for _ in range(40):
        for sequences in [*range(8, 8 + count), *range(64, 64 + count)]:
            fit.observe(sequences, 1000 * sequences, truth(sequences))
    assert fit.costs.decode_s(64, 64_000) == pytest.approx(truth(64), rel=0.03)


def test_what_is_measured_late_counts_most() -> None:
    fit, draw = DecodeFit(), random.Random(0)
    for pace in (2.0, 1.0):
        for _ in range(300):
            sequences = draw.randint(1, 64)
            fit.observe(sequences, 0, pace * (0.005 + sequences * 5e-5))
    assert fit.costs.decode_s(40, 0) == pytest.approx(0.007, rel=0.02)


BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128)
MEASURED = StepCosts.of_batches(BATCHES, [0.004 + batch * 2e-5 for batch in BATCHES])


def test_a_curve_is_flat_up_to_a_full_batch_but_for_its_last_sequences() -> None:
    assert MEASURED.decode_step_s == pytest.approx(0.004 + 2e-5)
    for sequences, batch in ((33, 64), (60, 64), (65, 96), (92, 96), (128, 128), (200, 128)):
        assert MEASURED.decode_s(sequences, 0) == pytest.approx(0.004 + batch * 2e-5), sequences
    assert MEASURED.times(62) < MEASURED.times(63) < MEASURED.times(65)


def test_a_batch_that_takes_no_longer_than_a_smaller_one_adds_nothing() -> None:
    costs = StepCosts.of_batches((1, 2, 4, 8), (0.004, 0.0039, 0.004, 0.005))
    assert costs.times(3) == 1
    assert costs.times(8) == 1.25
    assert list(costs.decode_curve.at) == sorted(set(costs.decode_curve.at))


def test_steps_are_predicted_by_their_curve_before_any_was_measured() -> None:
    costs = DecodeFit(MEASURED).costs
    assert costs.decode_s(80, 80_000) == pytest.approx(0.004 + 96 * 2e-5)


def test_steps_with_drafts_are_fitted_by_their_rows() -> None:
    """Four rows a sequence; what a step of one row each takes is known from them, too."""
    fit, draw = DecodeFit(MEASURED), random.Random(0)
    for _ in range(200):
        sequences = draw.randint(1, 32)
        seconds = 1.1 * MEASURED.decode_s(sequences, 0, rows=4 * sequences) + sequences * 1000 * 3e-8
        fit.observe(sequences, sequences * 1000, seconds, 4 * sequences)
    for rows in (10, 30):
        expected = 1.1 * MEASURED.decode_s(10, 0, rows=rows) + 10_000 * 3e-8
        assert fit.costs.decode_s(10, 10_000, rows=rows) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("pace", [0.9, 1.1])
def test_what_a_curve_does_not_know_is_fitted(pace: float) -> None:
    """Steps are of padded batches, take 10 % less or more than at the start, and read their contexts."""
    fit, draw = DecodeFit(MEASURED), random.Random(0)

    def truth(sequences: int, context: int) -> float:
        return pace * MEASURED.decode_s(sequences, 0) + context * 3e-8

    for _ in range(200):
        sequences = draw.randint(1, 128)
        tokens = sequences * draw.randint(100, 2000)
        fit.observe(sequences, tokens, truth(sequences, tokens))
    costs = fit.costs
    for sequences in (10, 60, 66, 90, 97):
        tokens = sequences * 1000
        assert costs.decode_s(sequences, tokens) == pytest.approx(truth(sequences, tokens), rel=0.02)
