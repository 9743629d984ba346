"""What a layer's products take by their number of rows, and which numbers of rows are worth it. Torch-free.

A GPU computes a product in tiles, as many at a time as it has multiprocessors. So the time rises in stairs: a
few rows beyond what some whole rounds of tiles hold take nearly as long as another round. An 8B model on an
H200, of 132 multiprocessors: a step of 1,024 rows takes 20.2 ms; with 64 rows of decode 27.2, of which the
attention of decode is some 2.4 (bench/LOG.md, 2026-11-27).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

# How many more rows a second a smaller step must compute for some to be left to the next one.
_WORTH = 1.04


@dataclass(frozen=True, slots=True)
class RowTimes:
    """`rows`: the numbers that were measured, ascending; `seconds`: what the products of each take. Both are
    empty where nothing was measured: then every number of rows is as good."""

    rows: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()

    def seconds_of(self, rows: int) -> float:
        """Seconds of so many rows, which are padded to the next number that was measured."""
        if not self.rows:
            return 0.0
        at = bisect.bisect_left(self.rows, rows)
        if at == len(self.rows):
            return self.seconds[-1] * rows / self.rows[-1]
        return self.seconds[at]

    def joins(self, rows: int, others: int) -> bool:
        """Whether products of `rows` rows and `others` together take no longer than of each by
        themselves."""
        return self.seconds_of(rows + others) <= self.seconds_of(rows) + self.seconds_of(others)

    def most_worth(self, rows: int, others: int) -> int:
        """The number of rows, at least half of `rows`, of which most are computed a second beside `others`;
        `rows` where no smaller number is clearly better."""
        smaller = [each - others for each in self.rows if rows <= 2 * (each - others) < 2 * rows]
        best = max(smaller, key=lambda each: self._rate(each, others), default=rows)
        return best if self._rate(best, others) > _WORTH * self._rate(rows, others) else rows

    def _rate(self, rows: int, others: int) -> float:
        return rows / (self.seconds_of(rows + others) or 1.0)
