"""Reads the steps' time stamps while they run, and computes gaps, busy time and tails.

A step writes one line to a ring of 4,096 on the GPU: the start of its first kernel, the end of the head's
product (where the graph samples), the end of the step, in nanoseconds of one clock, and its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from baton.engine.executor.decode_loop import DecodeLoop

Lines = npt.NDArray[np.int64]
BEGUN, HEAD_ENDED, ENDED, ROWS = range(4)
# So many lines unread, and a copy is begun: far from a whole ring, so that none is lost to a late one.
_AT = 1024
# A gap beyond this is late.
_LATE_NS = 5000


class Copying(Protocol):
    """A running copy of the ring."""

    def ended(self) -> Lines | None:
        """The copied ring; None until it is complete."""


class ClockSource(Protocol):
    """The source of the lines: `count` of them, line n at n % count."""

    count: int

    def copy(self) -> Copying:
        """Starts a copy in the background."""


class ClockReader:
    """Collects every line from then on; call `look` regularly in the loop's thread."""

    def __init__(self, source: ClockSource, ended: int) -> None:
        """`ended`: the number of steps that have ended; the next one's line is the first that is kept."""
        self._source = source
        self.first = ended
        self._taken = ended
        self._copying: tuple[int, Copying] | None = None
        self._parts: list[Lines] = []

    def look(self, ended: int, *, at: int = _AT) -> None:
        """`ended`: the number of steps that have ended. Raises RuntimeError where lines were overwritten
        unread."""
        if self._copying is None:
            if ended - self._taken >= at:
                self._copying = ended, self._source.copy()
            return
        until, copying = self._copying
        ring = copying.ended()
        if ring is None:
            return
        if ended - self._taken >= self._source.count:
            raise RuntimeError(f"{ended - self._taken} lines of clocks in a ring of {self._source.count}")
        self._parts.append(ring[np.arange(self._taken, until) % self._source.count])
        self._taken, self._copying = until, None

    def finish(self, ended: int) -> Lines:
        """All lines so far; no step may be running."""
        while self._taken < ended or self._copying is not None:
            self.look(ended, at=1)
        return np.concatenate(self._parts) if self._parts else np.zeros((0, 4), np.int64)


def figures(lines: Lines) -> dict[str, Any]:
    """Figures of at least two consecutive steps: `tpot_ms` between their ends, `gap_us_p50`, `gap_us_p99`,
    `busy`.

    gap: end of a step's last kernel to the start of the next step's first; `late_gaps`: the number above 5
    µs. `tail_us`: median from the end of the head's product to the end of the step; None where the former is
    not recorded. In Triton's interpreter the clock does not advance: only steps and rows are returned.
    """
    # Nanoseconds since 1970 lose 0.2 µs as float64.
    lines = np.concatenate([lines[:, :ROWS] - lines[0, BEGUN], lines[:, ROWS:]], axis=1)
    gaps = np.sort(lines[1:, BEGUN] - lines[:-1, ENDED])
    window = int(lines[-1, ENDED] - lines[0, ENDED])
    noted = (lines[:, HEAD_ENDED] >= lines[:, BEGUN]) & (lines[:, HEAD_ENDED] <= lines[:, ENDED])
    tails = np.sort((lines[:, ENDED] - lines[:, HEAD_ENDED])[noted])
    rows = lines[1:, ROWS]
    counted = {"steps": len(lines), "mean_rows": round(float(rows.mean()), 2)}
    if not window:
        return counted
    return {
        **counted,
        "tpot_ms": round(window / len(gaps) / 1e6, 4),
        "tokens_s": round(float(rows.sum()) / window * 1e9),
        "gap_us_p50": _microseconds(gaps, 0.5),
        "gap_us_p99": _microseconds(gaps, 0.99),
        "gap_us_max": _microseconds(gaps, 1.0),
        "late_gaps": int((gaps > _LATE_NS).sum()),
        "busy": round(1 - float(gaps.sum()) / window, 5),
        "tail_us": _microseconds(tails, 0.5) if len(tails) else None,
    }


def _microseconds(ordered: npt.NDArray[np.int64], share: float) -> float:
    return round(float(ordered[min(len(ordered) - 1, int(len(ordered) * share))]) / 1e3, 2)


class _CopyOnStream:
    """`Copying` whose end an event tells; without one it has ended."""

    def __init__(self, here: torch.Tensor, event: torch.cuda.Event | None) -> None:
        self._here = here
        self._event = event

    def ended(self) -> Lines | None:
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            return None
        lines: Lines = self._here.numpy().copy()
        return lines


class GpuClocks:
    """`ClockSource` over `GraphStep.clocks`; on a CPU, where the interpreter writes them, a plain copy."""

    def __init__(self, clocks: torch.Tensor) -> None:
        import torch

        self.count = clocks.shape[0]
        self._clocks = clocks
        on_gpu = clocks.device.type == "cuda"
        self._here = torch.empty(clocks.shape, dtype=clocks.dtype, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]

    def copy(self) -> _CopyOnStream:
        import torch

        if self._stream is None:
            self._here.copy_(self._clocks)
            return _CopyOnStream(self._here, None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._here.copy_(self._clocks, non_blocking=True)
            event.record(self._stream)
        return _CopyOnStream(self._here, event)


def clock_source(loop: DecodeLoop) -> ClockSource | None:
    """The source; None for the loop in plain torch, which has no clocks."""
    step = getattr(loop, "step_state", None)
    return None if step is None else GpuClocks(step.clocks)
