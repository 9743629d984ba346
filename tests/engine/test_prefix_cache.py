"""The prefix cache's books against a brute-force model: references, tiers, what is published, each step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.prefix_driver import Driver


@pytest.mark.parametrize(("groups", "store"), [(1, 10), (2, 10), (1, 0)])
def test_random_requests_agree_with_the_model(groups: int, store: int) -> None:
    drive(groups, store, requests=400)


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "store"), [(1, 10), (2, 10), (1, 0)])
def test_ten_thousand_random_requests_agree_with_the_model(groups: int, store: int) -> None:
    drive(groups, store, requests=10_000)


def drive(groups: int, store: int, requests: int) -> None:
    driver = Driver(seed=groups + store, groups=groups, store=store)
    while driver.requests < requests:
        driver.step()
    driver.run_out()
    assert driver.did["hits"] > requests // 4
    assert driver.pools.cached.evicted > requests // 4
    assert (driver.did["from the store"] > 0) == (driver.did["spoilt"] > 0) == bool(store)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups=st.integers(1, 3),
    blocks=st.integers(10, 40),
    store=st.integers(0, 12),
    steps=st.integers(1, 150),
)
def test_any_worker_agrees_with_the_model(
    seed: int, groups: int, blocks: int, store: int, steps: int
) -> None:
    driver = Driver(seed, groups=groups, blocks=blocks, store=store)
    for _ in range(steps):
        driver.step()
    driver.run_out()
