"""Intervals against simulations whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from loadgen.analysis.intervals import (
    BlockBootstrap,
    correlation_time,
    independent_draws,
    interval,
    newcombe,
    share_interval,
    student,
    wilson,
)

Floats = NDArray[np.float64]


@given(st.integers(1, 5000), st.data())
def test_wilson_is_scipys(count: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, count))
    low, high = wilson(hits / count, count)
    expected = stats.binomtest(hits, count).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-9)


@given(st.integers(1, 300), st.integers(1, 300), st.data())
def test_newcombe(n1: int, n2: int, data: st.DataObject) -> None:
    p1, p2 = data.draw(st.integers(0, n1)) / n1, data.draw(st.integers(0, n2)) / n2
    low, high = newcombe((p1, n1), (p2, n2))
    assert -1 - 1e-12 <= low <= p2 - p1 <= high <= 1 + 1e-12
    back = newcombe((p2, n2), (p1, n1))
    assert back == pytest.approx((-high, -low))


def test_newcombe_of_his_paper() -> None:
    """56/70 against 48/80: Newcombe (1998), method 10, case (a)."""
    low, high = newcombe((48 / 80, 80), (56 / 70, 70))
    assert (low, high) == pytest.approx((0.0524, 0.3339), abs=1e-4)


@pytest.mark.parametrize("freedom", [3, 4, 5, 8, 20, 100])
def test_students_quantiles(freedom: int) -> None:
    assert student(0.95, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=0.02)
    assert student(0.95, math.inf) == pytest.approx(stats.norm.ppf(0.975))


def autoregressive(keep: float, count: int, seed: int) -> Floats:
    noise = np.random.default_rng(seed).normal(size=count)
    values = np.empty(count)
    values[0] = noise[0] / math.sqrt(1 - keep**2)
    for at in range(1, count):
        values[at] = keep * values[at - 1] + noise[at]
    return values


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_correlation_time_of_an_autoregressive_series(keep: float) -> None:
    """(1 + a) / (1 - a)."""
    found = np.mean([correlation_time(autoregressive(keep, 8000, seed)) for seed in range(8)])
    assert found == pytest.approx((1 + keep) / (1 - keep), rel=0.15)


@pytest.mark.parametrize("values", [[], [1.0], [2.0] * 50, [1.0, 2.0, 3.0]])
def test_correlation_time_of_nearly_nothing(values: list[float]) -> None:
    assert correlation_time(np.array(values)) == 1.0
    assert independent_draws(np.array(values)) == len(values)


@pytest.mark.parametrize(("keep", "count"), [(0.0, 400), (0.8, 2000), (0.95, 8000)])
def test_share_interval_holds_the_truth(keep: float, count: int) -> None:
    """The interval holds the truth in about 95 of 100 runs, even where hits come in bursts; one that takes
    them for independent does not."""
    limit = float(stats.norm.ppf(0.9)) / math.sqrt(1 - keep**2)
    held = naive = 0
    for seed in range(100):
        hits = (autoregressive(keep, count, seed) <= limit).astype(np.float64)
        low, high = share_interval(hits)
        held += low <= 0.9 <= high
        low, high = wilson(float(hits.mean()), count)
        naive += low <= 0.9 <= high
    assert held >= 88
    if keep == 0.95:
        assert naive < 70


@pytest.mark.parametrize("keep", [0.0, 0.9])
def test_bootstrap_of_percentiles_holds_the_truth(keep: float) -> None:
    truth = stats.norm.ppf([0.5, 0.9, 0.99]) / math.sqrt(1 - keep**2)
    held = np.zeros(3)
    for seed in range(60):
        values = autoregressive(keep, 3000, seed)
        bootstrap = BlockBootstrap(np.arange(3000.0), correlation_time(values), seed, resamples=200)
        draws = bootstrap.quantiles(values, np.arange(3000), np.array([0.5, 0.9, 0.99]))
        for place in range(3):
            ends = interval(draws[:, place], bootstrap.freedom)
            assert ends is not None
            held[place] += ends[0] <= truth[place] <= ends[1]
    assert (held >= 50).all(), held


def test_bootstrap_of_means_is_as_wide_as_in_theory() -> None:
    values = autoregressive(0.8, 6000, 5)
    bootstrap = BlockBootstrap(np.arange(6000.0), correlation_time(values), 1)
    spread = bootstrap.means(values).std()
    assert spread == pytest.approx(1 / (1 - 0.8) / math.sqrt(6000), rel=0.35)


def test_bootstrap_does_not_mind_the_order_of_rows() -> None:
    values = autoregressive(0.8, 500, 5)
    order = np.arange(500.0)
    mixed = np.random.default_rng(1).permutation(500)
    one = BlockBootstrap(order, 5.0, 1).means(values)
    other = BlockBootstrap(order[mixed], 5.0, 1).means(values[mixed])
    assert one == pytest.approx(other)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.floats(1.0, 100.0), st.integers(0, 100))
def test_bootstrap_quantiles_are_values_that_were_seen(
    values: list[float], correlation: float, seed: int
) -> None:
    array = np.array(values)
    bootstrap = BlockBootstrap(np.arange(float(len(array))), correlation, seed, resamples=20)
    draws = bootstrap.quantiles(array, np.arange(len(array)), np.array([0.5, 0.99]))
    assert np.isin(draws, array).all()
    assert (draws[:, 0] <= draws[:, 1]).all()


def test_an_interval_of_nothing() -> None:
    assert interval(np.array([np.nan])) is None
    assert wilson(0.5, 0) == (0.0, 1.0)
    assert share_interval(np.array([])) == (0.0, 1.0)
