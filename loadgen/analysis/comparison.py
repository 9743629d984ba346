"""Compares two runs: every difference with its interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from loadgen.analysis.columns import Columns
from loadgen.analysis.intervals import independent_draws, interval, newcombe
from loadgen.analysis.metrics import E2E, TBT10, TPOT, TTFT
from loadgen.analysis.quantities import bootstrap_of, defined, gaps_of
from loadgen.analysis.run_folder import Run
from loadgen.analysis.slo import Judge
from loadgen.common.arrays import Floats, Integers
from loadgen.common.record import Outcome, Record

PERCENTILES = (50.0, 90.0, 99.0)
DIFFERENCE_FORMULA = (
    "second - first; percentiles: both runs resampled in blocks of time; attainment: Newcombe's interval"
)


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of two runs. Times are in milliseconds; `low` and `high` bound second - first."""

    name: str
    unit: str
    first: float
    second: float
    low: float | None
    high: float | None

    @property
    def certain(self) -> bool:
        """True if the interval excludes zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def change(self) -> float | None:
        """The relative change, (second - first) / first."""
        return (self.second - self.first) / self.first if self.first else None


def compare(first: Run, second: Run) -> list[Difference]:
    """The differences in attainment and percentiles of figures that both runs have, within their windows."""
    one, other = _Side(first), _Side(second)
    differences: list[Difference] = []
    if first.settings.judge.goodput and second.settings.judge.goodput:
        low, high = newcombe(one.share, other.share)
        differences.append(Difference("attainment", "share", one.share[0], other.share[0], low, high))
    for metric in (TTFT, TPOT, E2E, TBT10):
        differences += _percentiles(metric.title, one.of(metric.of), other.of(metric.of))
    differences += _percentiles("ITL", one.gaps(), other.gaps())
    for name in ("output_tokens", "ended_well"):
        before, after = (float(getattr(run.summary.throughput, name)) for run in (first, second))
        differences.append(Difference(f"{name.replace('_', ' ')} a second", "/s", before, after, None, None))
    return differences


class _Side:
    """The window of one run, with its bootstrap."""

    def __init__(self, run: Run) -> None:
        columns = Columns.of(run.records, Judge.of(run.settings))
        window = run.summary.window
        inside = columns.within(window.since, np.nextafter(window.until, np.inf))
        hits = inside.good[inside.judged].astype(np.float64)
        self.share = (float(hits.mean()) if len(hits) else 0.0, independent_draws(hits))
        self._records = [record for record in inside.records if record.outcome == Outcome.OK]
        self._bootstrap = bootstrap_of(self._records, run.settings.load.seed + 1)

    def of(self, metric: Callable[[Record], float | None]) -> tuple[Floats, Floats, float]:
        """Percentiles of `values`, in the run and in every draw, and the degrees of freedom of the draws."""
        return self._drawn(*defined([metric(record) for record in self._records]))

    def gaps(self) -> tuple[Floats, Floats, float]:
        """The same, of all gaps between tokens."""
        return self._drawn(*gaps_of(self._records))

    def _drawn(self, seconds: Floats, rows: Integers) -> tuple[Floats, Floats, float]:
        if not len(seconds):
            return np.empty(0), np.empty(0), 0.0
        values, shares = seconds * 1e3, np.asarray(PERCENTILES) / 100
        drawn = self._bootstrap.quantiles(values, rows, shares)
        return np.quantile(values, shares), drawn, self._bootstrap.freedom


def _percentiles(
    title: str, one: tuple[Floats, Floats, float], other: tuple[Floats, Floats, float]
) -> list[Difference]:
    if not len(one[0]) or not len(other[0]):
        return []
    found: list[Difference] = []
    for place, percentile in enumerate(PERCENTILES):
        first, second = float(one[0][place]), float(other[0][place])
        ends = interval(other[1][:, place] - one[1][:, place], min(one[2], other[2]))
        low, high = ends if ends is not None else (None, None)
        found.append(Difference(f"{title} p{percentile:g}", "ms", first, second, low, high))
    return found
