"""The formulas against their definitions and against simulated queues."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest

from loadgen.sizing.queueing import occupancy_quantile, wait_quantile, waits_share


def test_one_server_waits_as_often_as_it_is_busy() -> None:
    for load in (0.1, 0.5, 0.9):
        assert waits_share(1, load) == pytest.approx(load)


def test_erlangs_c_is_the_sum_of_its_definition() -> None:
    for servers, load in ((2, 1.2), (5, 4.0), (20, 17.5)):
        terms = [load**count / math.factorial(count) for count in range(servers)]
        last = load**servers / math.factorial(servers) * servers / (servers - load)
        assert waits_share(servers, load) == pytest.approx(last / (sum(terms) + last))


def test_overload_has_no_bound() -> None:
    assert waits_share(2, 2.0) == 1.0
    assert wait_quantile(2, 4.0, 0.5, 0.0, 0.5) == math.inf


def test_short_waits_are_none() -> None:
    # A fifth of the arrivals waits at all.
    assert wait_quantile(1, 0.2, 1.0, 1.0, 0.79) == 0.0
    assert wait_quantile(1, 0.2, 1.0, 1.0, 0.9) > 0


def simulated(servers: int, rate: float, service_s: np.ndarray, seed: int) -> np.ndarray:
    """Waits of first come, first served."""
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(service_s)))
    free = [0.0] * servers
    waits = np.empty(len(service_s))
    for index, (arrival, service) in enumerate(zip(arrivals, service_s, strict=True)):
        start = max(arrival, heapq.heappop(free))
        waits[index] = start - arrival
        heapq.heappush(free, start + service)
    return waits


@pytest.mark.parametrize("servers", [1, 4])
@pytest.mark.parametrize("variation", [0.0, 1.0])
def test_waits_are_those_of_a_queue(servers: int, variation: float) -> None:
    count = 100_000
    service = np.random.default_rng(1).exponential(1.0, count) if variation else np.ones(count)
    waits = simulated(servers, 0.8 * servers, service, seed=2)
    for share in (0.9, 0.99):
        predicted = wait_quantile(servers, 0.8 * servers, 1.0, variation, share)
        assert predicted == pytest.approx(float(np.quantile(waits, share)), rel=0.06)


def test_occupancy_is_that_of_a_poisson_variable() -> None:
    drawn = np.random.default_rng(3).poisson(60, 100_000)
    assert occupancy_quantile(60, 0.95) == pytest.approx(float(np.quantile(drawn, 0.95)), rel=0.02)
    assert occupancy_quantile(60, 0.5) == pytest.approx(60)
