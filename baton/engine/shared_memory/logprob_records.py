"""Log-probabilities of tokens, and the array that carries them beside the output ring. Torch-free.

The ring's words stay small; a token whose request asks for logprobs has its record at the word's own
index in a second array of the same capacity. The producer writes the record, then publishes the word;
a record counts for the word whose lap it names, and any other there is of an earlier lap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.device.shared_memory import SharedMemory

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Logprobs:
    """One token's natural log-probability and the likeliest tokens', (id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LogprobBatch:
    """Logprobs of R rows, on the host.

    `rows` [R]: which rows of their batch. `counts` [R]: how many of `ids`, `values` each row asked for.
    `chosen` [R]; `ids` [R, n] and `values` [R, n], best first, of equals the lowest id first.
    """

    rows: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    chosen: npt.NDArray[np.float64]
    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    def all(self) -> list[Logprobs]:
        """The records as `Logprobs`, one for each row."""
        rows = zip(self.counts.tolist(), self.chosen.tolist(), self.ids, self.values, strict=True)
        return [
            Logprobs(chosen, tuple(zip(ids[:count].tolist(), values[:count].tolist(), strict=True)))
            for count, chosen, ids, values in rows
        ]


def _record(top: int) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("lap", "<u8"),
            ("count", "<u4"),
            ("logprob", "<f4"),
            ("ids", "<u4", (top,)),
            ("logprobs", "<f4", (top,)),
        ]
    )


def logprob_bytes(capacity: int, top: int) -> int:
    """Shared memory that the records of a ring of `capacity` words take; none where `top` is 0."""
    return capacity * _record(top).itemsize if top else 0


class LogprobRecords:
    """The array of records, at either end; `top` is the most alternatives that a record holds."""

    def __init__(self, memory: SharedMemory, offset: int, capacity: int, top: int) -> None:
        self.top = top
        self._capacity = np.uint64(capacity)
        self._records = memory.region(offset, capacity, _record(top))
        self._laps = self._records["lap"]

    def write(self, positions: npt.NDArray[np.uint64], batch: LogprobBatch) -> None:
        """Writes the record of each row of `batch`; row i's word will stand at ring position positions[i].

        Raises ValueError where a row has more alternatives than a record holds.
        """
        width = batch.ids.shape[1]
        if width > self.top:
            raise ValueError(f"{width} alternatives exceed the {self.top} that a record holds")
        records = np.zeros(len(positions), dtype=self._records.dtype)
        records["lap"] = positions // self._capacity + np.uint64(1)
        records["count"], records["logprob"] = batch.counts, batch.chosen
        records["ids"][:, :width], records["logprobs"][:, :width] = batch.ids, batch.values
        self._records[positions % self._capacity] = records

    def read(self, position: int) -> Logprobs | None:
        """The record of the word at `position`, which has been published; None where it has none."""
        lap, index = divmod(position, int(self._capacity))
        if int(self._laps[index]) != lap + 1:
            return None
        record = self._records[index]
        count = int(record["count"])
        ids, values = record["ids"][:count].tolist(), record["logprobs"][:count].tolist()
        return Logprobs(float(record["logprob"]), tuple(zip(ids, values, strict=True)))
