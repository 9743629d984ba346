"""Costs by sequences where a policy chooses how many rows these have."""

from __future__ import annotations

import pytest

from baton.engine.speculation.expected_costs import costs_by_sequences
from baton.perf_model.curve import Curve
from baton.perf_model.step_costs import StepCosts

# A row takes 0.1 ms beyond the first, a sequence another 0.1, and its context 1 ms.
BY_ROWS = StepCosts(
    decode_step_s=0.004,
    decode_sequence_s=1e-4,
    decode_context_token_s=1e-6,
    decode_curve=Curve((1.0, 129.0), (0.0, 0.0128)),
    prefill_token_s=0.5,
)
CONTEXT = 1000
NUMBERS = (1, 2, 4, 8, 16)
# By sequences the rows of a step, and the tokens that it gives each on average.
EXPECTED = {1: (8, 4.0), 2: (16, 4.0), 4: (16, 3.0), 8: (16, 2.0), 16: (16, 1.0)}


def token_s(sequences: int, rows: int, tokens: float) -> float:
    """Computes the predicted seconds a token by hand."""
    return (0.004 + 1e-4 * (rows - 1) + sequences * (1e-4 + 1e-3)) / tokens


def by_sequences(ran: int, tokens_a_step: float) -> StepCosts:
    return costs_by_sequences(
        BY_ROWS, EXPECTED.__getitem__, NUMBERS, ran=ran, tokens_a_step=tokens_a_step, context_tokens=CONTEXT
    )


@pytest.mark.parametrize("ran", [1, 4, 8])
def test_each_number_of_sequences_has_its_own_rows_and_tokens(ran: int) -> None:
    costs = by_sequences(ran, EXPECTED[ran][1])
    for sequences, (rows, tokens) in EXPECTED.items():
        found = costs.token_s(sequences, sequences * CONTEXT)
        assert found == pytest.approx(token_s(sequences, rows, tokens))
    assert costs.rows_a_sequence == 1
    assert costs.tokens_a_step == EXPECTED[ran][1]
    assert costs.prefill_token_s == BY_ROWS.prefill_token_s


def test_those_that_have_less_than_the_mean_have_less_with_other_numbers_too() -> None:
    """Half of what drafts give the mean, which is 2 more tokens with four sequences and 3 with one."""
    costs = by_sequences(4, 2.0)
    assert costs.token_s(4, 4 * CONTEXT) == pytest.approx(token_s(4, 16, 2.0))
    assert costs.token_s(1, CONTEXT) == pytest.approx(token_s(1, 8, 2.5))
    assert costs.token_s(16, 16 * CONTEXT) == pytest.approx(token_s(16, 16, 1.0))


def test_where_none_had_drafts_the_mean_is_expected() -> None:
    costs = by_sequences(16, 1.0)
    assert costs.token_s(2, 2 * CONTEXT) == pytest.approx(token_s(2, 16, 4.0))
    assert costs.token_s(16, 16 * CONTEXT) == pytest.approx(token_s(16, 16, 1.0))


def test_more_sequences_are_never_expected_to_be_faster() -> None:
    expected = {1: (8, 1.0), 2: (8, 3.0), 4: (8, 3.0)}
    costs = costs_by_sequences(
        BY_ROWS, expected.__getitem__, (1, 2, 4), ran=2, tokens_a_step=3.0, context_tokens=0
    )
    times = [costs.token_s(sequences, 0) for sequences in (1, 2, 3, 4)]
    assert times == sorted(times)
    assert costs.each_s(0) >= 0


def test_contexts_that_take_longer_than_all_the_rest_leave_no_negative_part() -> None:
    """Drafts bring enough tokens that a step's time is all for reading the contexts."""
    expected = {1: (8, 1.0), 2: (8, 8.0)}
    costs = costs_by_sequences(
        BY_ROWS, expected.__getitem__, (2,), ran=1, tokens_a_step=1.0, context_tokens=90_000
    )
    assert costs.decode_step_s == 0.0
    assert costs.token_s(2, 180_000) == pytest.approx((0.0047 + 0.0002 + 0.18) / 8)


def test_a_little_that_drafts_bring_is_scaled_too() -> None:
    """Two fifths of the half token that drafts give the mean."""
    expected = {1: (8, 2.0), 2: (8, 1.5)}
    costs = costs_by_sequences(
        BY_ROWS, expected.__getitem__, (1, 2), ran=2, tokens_a_step=1.2, context_tokens=0
    )
    assert costs.token_s(1, 0) == pytest.approx((0.0047 + 0.0001) / 1.4)
