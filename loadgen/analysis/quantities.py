"""Percentiles with their intervals, each under its formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.analysis.intervals import interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.analysis.intervals import BlockBootstrap

    Floats = NDArray[np.float64]
    Rows = NDArray[np.int64]

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its interval of 95 %; None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Quantity:
    """One time that requests have; all in milliseconds. `percentiles` is empty where nobody has it."""

    name: str
    title: str
    formula: str
    count: int
    mean: float | None
    max: float | None
    # By "50", "99.9" and so on.
    percentiles: dict[str, Estimate]

    def at(self, percentile: str) -> float | None:
        """The value of one percentile."""
        estimate = self.percentiles.get(percentile)
        return None if estimate is None else estimate.value


def quantity(
    name: str, title: str, formula: str, seconds: Floats, rows: Rows, bootstrap: BlockBootstrap | None
) -> Quantity:
    """Of values in seconds; value i belongs to the request in row `rows[i]` of what the bootstrap draws."""
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
