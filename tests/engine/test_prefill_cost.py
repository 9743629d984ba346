"""Units of chunks, their inverse, and the pace that is measured."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.model_config import ModelConfig
from baton.engine.prefill_cost import PrefillCost, half_context


@given(start=st.integers(0, 200_000), count=st.integers(1, 20_000), half=st.floats(100, 1e6))
def test_the_most_tokens_within_a_cost(start: int, count: int, half: float) -> None:
    cost = PrefillCost(half)
    within = cost.tokens_within(start, cost.of(start, count) * (1 + 1e-9))
    assert within in (count - 1, count)  # a float's width below
    assert cost.of(start, within) <= cost.of(start, count) * (1 + 1e-9)


def test_a_chunk_costs_what_its_parts_cost() -> None:
    cost = PrefillCost(1000.0)
    assert math.isclose(cost.of(0, 300), cost.of(0, 100) + cost.of(100, 200))
    assert math.isclose(cost.of(1000, 1), 2, rel_tol=1e-3)
    assert PrefillCost().of(10**6, 7) == 7


def test_the_pace_is_the_median_of_what_was_measured() -> None:
    cost = PrefillCost()
    assert cost.units_within(0.05) == math.inf
    cost.took(10, 5.0)  # the first compiles
    for _ in range(4):
        cost.took(100, 0.1)
    cost.took(0, 1.0)  # tells nothing
    assert math.isclose(cost.units_within(0.05), 50)


def test_attention_takes_as_long_as_the_products_where_it_should() -> None:
    """Llama-3.1-8B: 6.98e9 weights in its layers, 32 layers of width 4,096."""
    config = ModelConfig.load("models/demo")
    layer = 2 * config.hidden_size * (config.num_heads + config.num_kv_heads) * config.head_dim
    layer += 3 * config.hidden_size * config.intermediate_size
    operations = 4 * config.num_heads * config.head_dim
    assert math.isclose(half_context(config) * operations, 2 * layer)
