"""Confidence intervals for figures of one run.

Requests of one run are correlated: while a queue is long, all of them wait. So the number of requests is
divided by the correlation time, which says how many consecutive requests count as one independent draw:
Wilson's interval uses that many draws, and the bootstrap resamples whole blocks of time.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from loadgen.common.arrays import Floats, Integers

CONFIDENCE = 0.95
RESAMPLES = 400
_MOST_BLOCKS, _FEWEST_BLOCKS = 100, 10
# Sokal's rule: the sum of correlations ends where it exceeds its own value by this factor.
_WINDOW = 5.0

WILSON_FORMULA = "Wilson's interval on requests / correlation time"
BOOTSTRAP_FORMULA = "bootstrap of whole blocks of time, each some correlation times long"


def student(confidence: float, freedom: float) -> float:
    """The half-width of an interval in standard errors, where the error was estimated with `freedom` degrees
    of freedom. Cornish and Fisher's expansion; within 2 % from 3 degrees on.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    v = max(3.0, freedom)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def wilson(
    share: float, count: float, confidence: float = CONFIDENCE, freedom: float = math.inf
) -> tuple[float, float]:
    """Wilson's score interval of a share of `count` independent draws; (0, 1) for none.

    `freedom` is finite where `count` is an estimate itself.
    """
    if count <= 0:
        return 0.0, 1.0
    z = student(confidence, freedom)
    spread = 1 + z * z / count
    middle = (share + z * z / (2 * count)) / spread
    half = z / spread * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def newcombe(
    first: tuple[float, float], second: tuple[float, float], confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Newcombe's interval of second - first, both shares with their numbers of independent draws."""
    (p1, n1), (p2, n2) = first, second
    low1, high1 = wilson(p1, n1, confidence)
    low2, high2 = wilson(p2, n2, confidence)
    return (
        p2 - p1 - math.hypot(p2 - low2, high1 - p1),
        p2 - p1 + math.hypot(high2 - p2, p1 - low1),
    )


def correlation_time(values: Floats) -> float:
    """The integrated autocorrelation time of a series, in steps; 1 for independent values."""
    count = len(values)
    centred = np.asarray(values, np.float64) - np.mean(values) if count else values
    if count < 4 or not np.any(np.abs(centred) > 1e-12):
        return 1.0
    size = 2 ** math.ceil(math.log2(2 * count))
    spectrum = np.fft.rfft(centred, size)
    covariance = np.fft.irfft(spectrum * np.conj(spectrum), size)[:count]
    times = 2.0 * np.cumsum(covariance / covariance[0]) - 1.0
    ends = np.flatnonzero(np.arange(count) >= _WINDOW * times)
    return float(max(1.0, times[ends[0]] if len(ends) else times.max()))


def share_interval(hits: Floats, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's interval of the mean of a correlated series of 0 and 1."""
    count = len(hits)
    if not count:
        return 0.0, 1.0
    correlation = correlation_time(hits)
    draws = count / correlation
    return wilson(float(np.mean(hits)), draws, confidence, freedom_of(count, correlation))


def independent_draws(values: Floats) -> float:
    """The number of independent draws that a series is worth."""
    return len(values) / correlation_time(values)


def freedom_of(count: int, correlation: float) -> float:
    """Degrees of freedom of a variance that uses an estimated correlation time: its relative variance is
    2 (2 W + 1) / count with the window W = 5 correlation times (Sokal), which equals 2 / freedom.
    """
    if correlation <= 1.0:
        return math.inf
    return count / (2 * _WINDOW * correlation + 1)


class BlockBootstrap:
    """A block bootstrap: the time of a run is cut into blocks, which are resampled with replacement.

    All statistics of one instance use the same draws, so that their intervals are consistent.
    """

    def __init__(self, order: Floats, correlation: float, seed: int, resamples: int = RESAMPLES) -> None:
        """`order` is the due time of each row; `correlation` is the correlation time in rows."""
        rows = len(order)
        blocks = int(min(_MOST_BLOCKS, max(_FEWEST_BLOCKS, rows / (4.0 * correlation)), max(1, rows)))
        places = np.empty(rows, np.int64)
        places[np.argsort(order, kind="stable")] = np.arange(rows)
        self._block = places * blocks // max(1, rows)
        random = np.random.default_rng([seed, 21])
        # Row i: how often each block occurs in draw i.
        self.freedom = min(blocks - 1, freedom_of(rows, correlation))
        self._times = random.multinomial(blocks, np.full(blocks, 1 / blocks), resamples).astype(np.float64)

    def quantiles(self, values: Floats, rows: Integers, shares: Floats) -> Floats:
        """Quantiles of `values` in every draw, an array [draws, shares]; value i belongs to row `rows[i]`.

        NaN for a draw without values.
        """
        by_value = np.argsort(values, kind="stable")
        ordered, block = values[by_value], self._block[rows[by_value]]
        drawn = np.full((len(self._times), len(shares)), np.nan)
        for draw, times in zip(drawn, self._times, strict=True):
            weights = np.cumsum(times[block])
            if len(weights) and weights[-1] > 0:
                places = np.searchsorted(weights, shares * weights[-1], side="left")
                draw[:] = ordered[np.minimum(places, len(ordered) - 1)]
        return drawn

    def means(self, values: Floats) -> Floats:
        """The mean of one value per row, in every draw."""
        blocks = self._times.shape[1]
        sums = np.bincount(self._block, weights=values, minlength=blocks)
        counts = np.bincount(self._block, minlength=blocks)
        means: Floats = (self._times @ sums) / np.maximum(1e-12, self._times @ counts)
        return means


def interval(
    draws: Floats, freedom: float = math.inf, confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """The middle of the draws, widened for few degrees of freedom; None without draws."""
    draws = draws[~np.isnan(draws)]
    if not len(draws):
        return None
    wider = student(confidence, freedom) / student(confidence, math.inf)
    tail = (1 - confidence) / 2
    low, middle, high = np.quantile(draws, [tail, 0.5, 1 - tail])
    return float(middle - wider * (middle - low)), float(middle + wider * (high - middle))
