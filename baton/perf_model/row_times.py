"""Times of a layer's products by their number of rows, and the numbers of rows that are worth it. Torch-free.

A GPU computes a product in tiles, as many at a time as it has multiprocessors. So the time rises in stairs: a
few rows beyond what some whole rounds of tiles hold take nearly as long as another round. An 8B model on an
H200, of 132 multiprocessors: a step of 1,024 rows takes 20.2 ms; with 64 rows of decode 27.2, of which the
attention of decode is some 2.4 (bench/LOG-2026-11.md, 2026-11-27).
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

# Share of a larger number's time from which on products of a number of rows count as taking no less.
_AS_LONG = 0.98
# How many more rows a second a smaller step must compute for some to be left to the next one.
_WORTH = 1.04


@dataclass(frozen=True, slots=True)
class RowTimes:
    """Measured times by rows. `rows`: the numbers that products have, ascending; `seconds`: what the products
    of each take. Both are empty where nothing was measured: then every number of rows is as good."""

    rows: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()

    @classmethod
    def of(cls, measured: Mapping[int, float]) -> RowTimes:
        """Builds the table from seconds measured by number of rows, without the numbers that take no less
        than a larger one: those are better padded to it."""
        kept: list[tuple[int, float]] = []
        for rows, seconds in sorted(measured.items(), reverse=True):
            if not kept or seconds < _AS_LONG * kept[-1][1]:
                kept.append((rows, seconds))
        return cls(*zip(*reversed(kept), strict=True)) if kept else cls()

    def padded(self, rows: int) -> int:
        """Number of rows to which products of `rows` rows are padded; `rows` if nothing was measured. Raises
        ValueError beyond the largest."""
        if not self.rows:
            return rows
        if rows > self.rows[-1]:
            raise ValueError(f"{rows} rows, and products have up to {self.rows[-1]}")
        return self.rows[bisect.bisect_left(self.rows, rows)]

    def seconds_of(self, rows: int) -> float:
        """Seconds of products of `rows` rows, which are padded to the next number that was kept; 0 if none
        was measured."""
        if not self.rows:
            return 0.0
        at = bisect.bisect_left(self.rows, rows)
        if at == len(self.rows):
            return self.seconds[-1] * rows / self.rows[-1]
        return self.seconds[at]

    def joins(self, rows: int, others: int) -> bool:
        """True if products of `rows` rows and `others` together take no longer than each of them
        separately."""
        return self.seconds_of(rows + others) <= self.seconds_of(rows) + self.seconds_of(others)

    def most_worth(self, rows: int, others: int) -> int:
        """The number of rows, at least half of `rows`, of which most are computed a second beside `others`;
        `rows` where no smaller number is clearly better."""
        smaller = [each - others for each in self.rows if rows <= 2 * (each - others) < 2 * rows]
        best = max(smaller, key=lambda each: self._throughput(each, others), default=rows)
        return best if self._throughput(best, others) > _WORTH * self._throughput(rows, others) else rows

    def _throughput(self, rows: int, others: int) -> float:
        return rows / (self.seconds_of(rows + others) or 1.0)
