"""Units of chunks, their inverse, and the pace that is measured."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.model.families.registry import load_config
from baton.engine.model.tensors import half_context
from baton.perf_model.prefill_fit import PrefillFit, TimedPass
from baton.perf_model.step_costs import StepCosts


@given(start=st.integers(0, 200_000), count=st.integers(1, 20_000), half=st.floats(100, 1e6))
def test_the_most_tokens_within_a_cost(start: int, count: int, half: float) -> None:
    cost = PrefillFit(half)
    within = cost.tokens_within(start, cost.of(start, count) * (1 + 1e-9))
    assert within in (count - 1, count)  # a float's width below
    assert cost.of(start, within) <= cost.of(start, count) * (1 + 1e-9)


def test_a_chunk_costs_what_its_parts_cost() -> None:
    cost = PrefillFit(1000.0)
    assert math.isclose(cost.of(0, 300), cost.of(0, 100) + cost.of(100, 200))
    assert math.isclose(cost.of(1000, 1), 2, rel_tol=1e-3)
    assert PrefillFit().of(10**6, 7) == 7


def test_the_pace_is_the_median_of_what_was_measured() -> None:
    cost = PrefillFit()
    assert cost.units_within(0.05) == math.inf
    cost.took([(0, 10)], 5.0)  # the first compiles
    for _ in range(4):
        cost.took([(0, 100)], 0.1)
    assert math.isclose(cost.units_within(0.05), 50)


def test_a_step_of_few_rows_costs_as_much_as_the_least() -> None:
    cost = PrefillFit(1000.0, least_rows=200)
    assert cost.of_step([(0, 10), (0, 20)]) == pytest.approx(200 + (10 * 5 + 20 * 10) / 1000)
    assert cost.of_step([(0, 300)]) == pytest.approx(cost.of(0, 300))
    cost.took([(0, 10)], 0.2)  # nor does it make rows look dear
    assert cost.seconds_of(400) == pytest.approx(0.4, rel=1e-3)


def test_small_prompts_first_do_not_make_steps_small() -> None:
    """The host says any step in 20 ms; the device computes a row in 24 µs."""

    def step_s(rows: int) -> float:
        return max(0.020, 24e-6 * rows)

    cost = PrefillFit(least_rows=224)
    cost.begin(TimedPass(64, step_s(64)), TimedPass(2048, step_s(2048)))
    rows = 256
    for _ in range(50):
        cost.took([(0, rows)], step_s(rows))
        rows = cost.tokens_within(0, cost.units_within(0.025))
    assert rows == pytest.approx(0.025 / 24e-6, rel=0.01)
    assert cost.seconds_of(cost.of_step([(0, 10)])) == pytest.approx(0.020, rel=0.01)


def test_a_least_step_is_no_larger_than_the_largest() -> None:
    cost = PrefillFit(least_rows=224)
    cost.begin(TimedPass(64, 0.2), TimedPass(2048, 0.1))  # slow for once
    assert cost.of_step([(0, 1)]) == 2048
    cost = PrefillFit(least_rows=224)
    cost.begin(TimedPass(64, 0.001), TimedPass(2048, 0.1))
    assert cost.of_step([(0, 1)]) == 224


@pytest.mark.parametrize("few_s", [0.04, 0.2])
def test_a_host_that_was_slow_at_start_up_is_not_believed_for_long(few_s: float) -> None:
    """A pass of few rows took 40 or 200 ms; prompts of 256 tokens take 7 ms each, and a new prompt is
    expected to do so after a few of them. Larger steps bound what few rows take."""
    cost = PrefillFit(26_600.0, least_rows=224)
    cost.begin(TimedPass(64, few_s), TimedPass(2048, 24e-6 * 2048))
    assert cost.added_to(StepCosts()).prompt_s(256) > 0.035
    for _ in range(9):
        cost.took([(0, 1200)], 24e-6 * 1200)
    assert cost.added_to(StepCosts()).prompt_s(256) == pytest.approx(24e-6 * 1200, rel=0.05)
    for _ in range(9):
        cost.took([(0, 256)], 0.007)
    assert cost.added_to(StepCosts()).prompt_s(256) == pytest.approx(0.007, rel=0.15)
    assert cost.seconds_of_step([(0, 2048)]) == pytest.approx(24e-6 * 2048, rel=0.15)
    for _ in range(9):
        cost.took([(0, 20)], 0.003)
    assert cost.least_rows == 224, "by the model's sizes no fewer take as long"


def test_steps_beside_decode_steps_alone_bound_few_rows_as_well() -> None:
    """A combined worker that has always something to decode: its steps of 1,900 rows are not few."""
    cost = PrefillFit(26_600.0, least_rows=224)
    cost.begin(TimedPass(64, 0.2), TimedPass(2048, 24e-6 * 2048))
    for _ in range(9):
        cost.took([(0, 256)], 0.004, mixed=True, decode_s=0.0055)
    assert cost.least_rows == int(0.0095 / 24e-6)
    assert cost.seconds_of_step([(0, 256)], mixed=True) == 0.004
    assert cost.seconds_of_step([(0, 1900)], mixed=True) == pytest.approx(24e-6 * 1900, rel=0.05)


def test_a_first_step_of_few_rows_beside_decode_that_was_slow_says_little() -> None:
    cost = PrefillFit(26_600.0, least_rows=224)
    cost.begin(TimedPass(64, 0.0054), TimedPass(2048, 24e-6 * 2048))
    cost.took([(0, 100)], 0.086, mixed=True)
    assert cost.added_to(StepCosts()).prompt_s(256) == pytest.approx(256 * 24e-6, rel=0.02)
    assert cost.seconds_of_step([(0, 100)], mixed=True) == cost.seconds_of_step([(0, 100)])
    for _ in range(2):
        cost.took([(0, 100)], 0.003, mixed=True)
    assert cost.seconds_of_step([(0, 100)], mixed=True) == 0.003


@given(pace=st.floats(1e-6, 1e-3), slowness=st.floats(0.7, 8), seed=st.integers(0, 100))
def test_how_slow_attention_is_is_measured_apart(pace: float, slowness: float, seed: int) -> None:
    """Whatever the order of steps near and far from their prompts' beginning, and a bad one now and then."""
    draw, cost = random.Random(seed), PrefillFit(1000.0)
    for number in range(200):
        start, count = draw.choice([(0, 100), (20_000, 50), (50, 200), (5000, 100)])
        seconds = pace * (count + slowness * count * (start + count / 2) / 1000)
        cost.took([(start, count)], seconds * (50 if number % 11 == 3 else 1))
    for start in (0, 1000, 30_000):
        seconds = pace * (70 + slowness * 70 * (start + 35) / 1000)
        assert cost.seconds_of(cost.of(start, 70)) == pytest.approx(seconds, rel=0.15)
        assert cost.tokens_within(start, cost.units_within(seconds)) in range(59, 84)


@pytest.mark.parametrize("underestimate", [0.25, 0.7])
def test_attention_thought_too_fast_is_learned_again(underestimate: float) -> None:
    """Steps of which, by what was learned, attention is the smaller part: 256 rows 20,000 tokens into a
    prompt, whose attention takes as long by arithmetic as 192 rows, and three times that in fact."""
    cost, half, pace, slowness = PrefillFit(26_600.0, least_rows=224), 26_600.0, 24e-6, 3.0
    cost.begin(TimedPass(64, pace * 320), TimedPass(2048, pace * 2048))
    for _ in range(9):
        cost.took([(80_000, 1024)], pace * (1024 + underestimate * 1024 * 80_512 / half))
    assert cost.attention <= 0.71
    rows, context = max(256, cost.least_rows), 256 * 20_128 / half
    for _ in range(5):
        cost.took([(20_000, 256)], pace * (rows + slowness * context))
    assert cost.attention == pytest.approx(slowness, rel=0.01)


def test_attention_takes_as_long_as_the_products_where_it_should() -> None:
    """Llama-3.1-8B: 6.98e9 weights in its layers, 32 layers of width 4,096."""
    config = load_config("baton/demo_model")
    layer = 2 * config.hidden_size * (config.num_heads + config.num_kv_heads) * config.head_dim
    layer += 3 * config.hidden_size * config.intermediate_size
    operations = 4 * config.num_heads * config.head_dim
    assert math.isclose(half_context(config) * operations, 2 * layer)


def test_what_few_rows_take_beside_a_decode_step_is_learned_for_such_steps_alone() -> None:
    """The few rows read no weights of their own."""
    cost = PrefillFit(26_600)
    cost.begin(TimedPass(64, 0.0045), TimedPass(2048, 0.04096))
    alone = cost.seconds_of_step([(0, 190)])
    assert (alone, cost.added_to(StepCosts()).prefill_step_s) == pytest.approx((0.0045, 0.0045), rel=0.02)
    for seconds in (0.0029, 0.02, 0.0031, 0.003):
        cost.took([(1400, 150), (0, 40)], seconds, mixed=True)
    assert (
        cost.seconds_of_step([(0, 190)], mixed=True)
        == cost.added_to(StepCosts()).prefill_step_s
        == pytest.approx(0.00305)
    )
    assert cost.seconds_of_step([(0, 190)]) == alone
    assert cost.seconds_of_step([(0, 512)], mixed=True) == cost.seconds_of_step([(0, 512)])
    cost.took([(0, 1024)], 0.03, mixed=True)
    assert cost.seconds_of_step([(0, 1024)]) > 0.0205
