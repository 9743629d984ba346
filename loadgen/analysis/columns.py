"""The counted requests of a run as arrays, one row per request, ordered by due time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.analysis.slo import Judge
from loadgen.common.arrays import Flags, Floats
from loadgen.common.record import NOT_COUNTED, Outcome, Record


@dataclass(frozen=True, slots=True)
class Columns:
    """Arrays of the requests; times in seconds since the start. A request that never ended has its end at
    infinity."""

    records: tuple[Record, ...]
    scheduled: Floats
    ended: Floats
    ok: Flags
    cancelled: Flags
    good: Flags

    @classmethod
    def of(cls, records: Sequence[Record], judge: Judge) -> Columns:
        """Builds the arrays; requests that were stopped with the run are left out."""
        counted = tuple(record for record in records if record.outcome not in NOT_COUNTED)
        return cls(
            records=counted,
            scheduled=np.array([record.scheduled for record in counted], np.float64),
            ended=np.array([np.inf if record.ended is None else record.ended for record in counted]),
            ok=np.array([record.outcome == Outcome.OK for record in counted], np.bool_),
            cancelled=np.array([record.outcome == Outcome.CANCELLED for record in counted], np.bool_),
            good=np.array([judge.good(record) for record in counted], np.bool_),
        )

    def __len__(self) -> int:
        return len(self.records)

    def within(self, since: float, until: float) -> Columns:
        """The requests that were due in [since, until) seconds."""
        return self.where((self.scheduled >= since) & (self.scheduled < until))

    def where(self, rows: Flags) -> Columns:
        """Returns the columns of the rows that are True in `rows`."""
        return Columns(
            tuple(record for record, is_in in zip(self.records, rows, strict=True) if is_in),
            self.scheduled[rows],
            self.ended[rows],
            self.ok[rows],
            self.cancelled[rows],
            self.good[rows],
        )

    @property
    def judged(self) -> Flags:
        """The rows that count for attainment: all but those that their client cancelled."""
        return ~self.cancelled
