"""Step costs by hand, as a worker reports them, and as curves say."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from baton.perf_model.curve import Curve
from baton.perf_model.messages import from_message, to_message
from baton.perf_model.step_costs import StepCosts

COSTS = StepCosts(
    prefill_token_s=20e-6,
    prefill_step_s=5e-3,
    prefill_half_context=20_000,
    decode_step_s=4e-3,
    decode_sequence_s=1e-5,
    decode_context_token_s=2e-8,
    decode_curve=Curve((1, 8, 9, 64), (0.0, 0.0, 1e-3, 4e-3)),
)


@pytest.mark.parametrize(
    ("tokens", "cached", "seconds"),
    [
        (1000, 0, 0.020 + 20e-6 * 1000 * 500 / 20_000),
        (0, 0, 0.005),  # a whole prompt is cached: its last token is computed
        (100, 0, 0.005 + 20e-6 * 100 * 50 / 20_000),
        (40_100, 40_000, 0.005 + 20e-6 * 100 * 40_050 / 20_000),
    ],
)
def test_a_prompt_takes_its_rows_or_the_weights_and_its_attention(
    tokens: int, cached: int, seconds: float
) -> None:
    assert COSTS.prompt_s(tokens, cached) == pytest.approx(seconds, rel=1e-4)
    assert COSTS.prefill_s([(cached, max(1, tokens - cached))]) == COSTS.prompt_s(tokens, cached)


def test_chunks_of_a_step_share_its_weights() -> None:
    parts = COSTS.prefill_s([(0, 100)]), COSTS.prefill_s([(5000, 100)])
    together = COSTS.prefill_s([(0, 100), (5000, 100)])
    assert together == pytest.approx(sum(parts) - 0.005)


def test_a_decode_step_is_as_long_as_its_batch() -> None:
    assert COSTS.decode_s(8, 8000) == pytest.approx(4e-3 + 8e-5 + 1.6e-4)
    assert COSTS.decode_s(8, 8000, rows=16) == pytest.approx(COSTS.decode_s(8, 8000) + 1e-3 + 3e-3 * 7 / 55)
    assert replace(COSTS, tokens_a_step=1.6).token_s(8, 8000) == pytest.approx(COSTS.decode_s(8, 8000) / 1.6)
    assert COSTS.each_s(1000) == pytest.approx(4e-3 / 63 + 1e-5 + 2e-5)


def test_with_drafts_a_step_has_more_rows_and_gives_more_tokens() -> None:
    drafts = replace(COSTS, tokens_a_step=1.6, rows_a_sequence=4.0)
    assert drafts.decode_s(8, 8000) == COSTS.decode_s(8, 8000, rows=32)
    assert drafts.token_s(8, 8000) == pytest.approx(COSTS.decode_s(8, 8000, rows=32) / 1.6)
    assert drafts.each_s(1000) == pytest.approx((4 * 4e-3 / 63 + 1e-5 + 2e-5) / 1.6)
    assert drafts.shared_s == pytest.approx(4e-3 / 1.6)
    assert from_message(to_message(drafts)) == drafts


def test_nothing_measured_takes_no_time() -> None:
    nothing = StepCosts()
    assert nothing.prompt_s(1000) == nothing.prefill_s([(0, 1000)]) == 0
    assert nothing.decode_s(10, 10_000) == nothing.each_s(1000) == 0
    assert nothing.times(10) == 1


@pytest.mark.parametrize("costs", [COSTS, StepCosts(), replace(COSTS, prefill_half_context=math.inf)])
def test_routers_predict_by_what_workers_predict(costs: StepCosts) -> None:
    """Points of a curve are whole numbers on the wire."""
    assert from_message(to_message(costs)) == costs


def test_curves_are_interpolated_as_numpy_does() -> None:
    draw = random.Random(1)
    for _ in range(50):
        at = sorted(draw.sample(range(1, 300), draw.randint(1, 8)))
        values = sorted(draw.random() for _ in at)
        curve = Curve(tuple(map(float, at)), tuple(values))
        for x in [*at, *(draw.uniform(0, 310) for _ in range(20))]:
            assert curve.value(x) == pytest.approx(float(np.interp(x, at, values)), rel=1e-12)
    assert Curve().value(7) == 0


def test_a_curve_goes_on_with_its_last_slope() -> None:
    curve = Curve((1.0, 2.0, 4.0), (0.0, 5.0, 6.0))
    assert [curve.extended(x) for x in (0, 3, 4, 8)] == [0, 5.5, 6, 8]
    assert Curve((1.0,), (3.0,)).extended(9) == 3
    assert curve.scaled(2).values == (0, 10, 12)
