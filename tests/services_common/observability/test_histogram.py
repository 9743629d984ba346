"""Histograms: what Prometheus gets, and quantiles of them."""

from __future__ import annotations

import random

import pytest

from services.common.observability.histogram import (
    EXPORTED_SECONDS,
    EXPORTED_TOKENS,
    SECONDS,
    TOKENS,
    Histogram,
    quantile,
    tokens_histogram,
)


@pytest.mark.parametrize(("bounds", "exported"), [(SECONDS, EXPORTED_SECONDS), (TOKENS, EXPORTED_TOKENS)])
def test_exported_bounds_are_bounds(bounds: tuple[float, ...], exported: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))
    assert set(exported) <= set(bounds)


def test_cumulative_counts_are_exact() -> None:
    rng = random.Random(1)
    values = [rng.lognormvariate(-4, 3) for _ in range(2000)] + [0.01, 0.0, -0.001, 1e9]
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    for bound, count in histogram.cumulative():
        assert count == sum(value <= bound for value in values), bound
    assert histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values))


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99])
def test_quantiles_are_right_to_a_bucket(share: float) -> None:
    rng = random.Random(2)
    values = sorted(rng.lognormvariate(-5, 1) for _ in range(5000))
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    exact = values[int(share * len(values))]
    assert quantile(histogram.bounds, histogram.counts, share) == pytest.approx(exact, rel=0.08)


def test_quantile_without_observations() -> None:
    assert quantile(SECONDS, Histogram().counts, 0.99) == 0


def test_values_above_the_last_bound() -> None:
    histogram = tokens_histogram()
    histogram.observe(1e12)
    assert quantile(histogram.bounds, histogram.counts, 0.5) == TOKENS[-1]
