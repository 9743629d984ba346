"""Percentiles with intervals and formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.analysis.intervals import BlockBootstrap, correlation_time, interval
from loadgen.analysis.metrics import e2e, itl_of
from loadgen.common.arrays import Floats, Integers
from loadgen.common.record import Record

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval; None where it is unknown."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Quantity:
    """Percentiles of one latency in milliseconds; empty where no request has it."""

    name: str
    title: str
    formula: str
    count: int
    mean: float | None
    max: float | None
    # Keys are "50", "99.9" and so on.
    percentiles: dict[str, Estimate]

    def at(self, percentile: str) -> float | None:
        """The value of one percentile, or None."""
        estimate = self.percentiles.get(percentile)
        return None if estimate is None else estimate.value


def quantity(
    name: str, title: str, formula: str, seconds: Floats, rows: Integers, bootstrap: BlockBootstrap | None
) -> Quantity:
    """The Quantity for values in seconds; value i belongs to row `rows[i]` of the bootstrap."""
    if not len(seconds):
        return Quantity(name, title, formula, 0, None, None, {})
    values = seconds * 1e3
    shares = np.asarray(PERCENTILES) / 100
    found = np.quantile(values, shares)
    drawn = bootstrap.quantiles(values, rows, shares) if bootstrap is not None else None
    percentiles: dict[str, Estimate] = {}
    for place, percentile in enumerate(PERCENTILES):
        ends = None
        if bootstrap is not None and drawn is not None:
            ends = interval(drawn[:, place], bootstrap.freedom)
        value = float(found[place])
        percentiles[f"{percentile:g}"] = (
            Estimate(value)
            if ends is None
            else Estimate(value, max(0.0, min(ends[0], value)), max(ends[1], value))
        )
    return Quantity(name, title, formula, len(values), float(values.mean()), float(values.max()), percentiles)


def defined(values: Sequence[float | None]) -> tuple[Floats, Integers]:
    """Values that are not None, and their rows."""
    rows = np.array([row for row, value in enumerate(values) if value is not None], np.int64)
    return np.array([value for value in values if value is not None], np.float64), rows


def gaps_of(records: Sequence[Record]) -> tuple[Floats, Integers]:
    """The ITL of all tokens in seconds, and the row of each one's request."""
    gaps = [itl_of(record.token_times) for record in records]
    rows = np.repeat(np.arange(len(gaps)), [len(gap) for gap in gaps])
    return np.concatenate([*gaps, np.empty(0)]), rows


def bootstrap_of(records: Sequence[Record], seed: int) -> BlockBootstrap:
    """The bootstrap for figures of these requests, whose latencies are correlated."""
    latency = np.array([e2e(record) for record in records], np.float64)
    order = np.array([record.scheduled for record in records])
    return BlockBootstrap(order, correlation_time(latency), seed)
