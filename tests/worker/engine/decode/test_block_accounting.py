"""The decode side's accounting of shared blocks: random requests, compared with a reference after each
step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fewer import each_value_once
from tests.worker.engine.decode.decode_driver import Driver

HOSTS = (0, 40)


@pytest.mark.parametrize(("groups", "host"), each_value_once([1, 2], HOSTS))
def test_random_requests_agree_with_the_reference(groups: int, host: int) -> None:
    drive(groups, host, requests=120)


@pytest.mark.parametrize("requests", [120, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("host", "most_tokens"), each_value_once(HOSTS, [4, 1]))
def test_four_rows_a_slot_agree_with_the_reference(host: int, most_tokens: int, requests: int) -> None:
    drive(1, host, requests=requests, rows_per_slot=4, most_tokens=most_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS, ids=["preempted", "swapped"])
@pytest.mark.parametrize("groups", [1, 2])
def test_ten_thousand_random_requests_agree_with_the_reference(groups: int, host: int) -> None:
    drive(groups, host, requests=10_000)


def drive(groups: int, host: int, requests: int, *, rows_per_slot: int = 1, most_tokens: int = 1) -> None:
    driver = Driver(
        groups + host, groups=groups, host=host, rows_per_slot=rows_per_slot, most_tokens=most_tokens
    )
    while driver.requests < requests:
        driver.step()
    driver.run_out()
    did, allocation = driver.did, driver.decode.allocation
    assert did["admitted"] > requests // 8
    assert did["held"] > requests // 2
    assert did["announced"] > requests // 16
    assert did["described"] > requests // 16
    assert did["lied"] > requests // 200
    assert driver.pools.cached.evicted > requests * 2 // 3  # 225 to 555 of 300 with other seeds
    assert (allocation.preempted > 0, allocation.swapped_out > 0) == (not host, bool(host))


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups=st.integers(1, 3),
    blocks=st.integers(45, 90),
    host=st.integers(0, 60),
    steps=st.integers(1, 150),
)
def test_any_pool_sizes_agree_with_the_reference(
    seed: int, groups: int, blocks: int, host: int, steps: int
) -> None:
    driver = Driver(seed, groups=groups, blocks=blocks, host=host)
    for _ in range(steps):
        driver.step()
    driver.run_out()
