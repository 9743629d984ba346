"""What the clients of a run saw between tokens: the first gap, which an admitted sequence waits for its first
decode step, and inter-token latencies. Computed from the records, so the same for every server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from loadgen.common.record import Outcome, Record

# Gaps of a request after its first that say how long a step was then.
_NEXT = 8
# Tokens that come within so many ms of the one before came in one message with it, or in one read.
_TOGETHER_MS = 0.2
# Stages of the router that a first gap consists of; loadgen knows them over gRPC.
_GAP_PARTS = ("transfer", "first_step")


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """In ms; `step`: the median inter-token latency. `first_gap`: between first and second token; `itl`:
    between all others. `first_over_two_p99`: of first gaps less two steps of that time, which is what is lost
    beside the wait for the next step and that step; a step of that time is the median of the request's next
    gaps. The batch changes, and steps with it, so that two median steps are less than two of the longest.
    `together`: the share of later tokens that came with the one before; much of it means that the router or
    the client has not kept up."""

    step: float
    first_gap_p50: float
    first_gap_p99: float
    first_over_two_p99: float
    itl_p99: float
    itl_p999: float
    together: float
    # p50 and p99 of two stages of first gaps, as the router reports them over gRPC: from the first token to
    # the end of the handoff (`transfer`), and from there to the first token of decode (`first_step`).
    gap_parts: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        first = f"{self.first_gap_p50:.1f} and {self.first_gap_p99:.1f} ms"
        steps = [self.first_gap_p50, self.first_gap_p99, self.itl_p99, self.itl_p999]
        in_steps = [f"{value / self.step:.2f}" if self.step else "-" for value in steps]
        return (
            f"step {self.step:.2f} ms; first gap p50 and p99 {first}, {in_steps[0]} and {in_steps[1]} steps, "
            f"p99 over two steps of its time {self.first_over_two_p99:+.1f} ms; "
            f"ITL p99 and p99.9 {self.itl_p99:.1f} and {self.itl_p999:.1f} ms, {in_steps[2]} and "
            f"{in_steps[3]} steps; {self.together:.1%} of tokens with the one before{self._parts()}"
        )

    def _parts(self) -> str:
        if not self.gap_parts:
            return ""
        parts = [f"{part} {p50:.1f} and {p99:.1f}" for part, (p50, p99) in self.gap_parts.items()]
        return f"; of the first gap at the router, ms: {', '.join(parts)}"


def stream_figures(records: Iterable[Record]) -> StreamFigures | None:
    """Of all requests that were answered in full; None where none has three tokens."""
    first, over, others = list[float](), list[float](), list[np.ndarray]()
    parts: dict[str, list[float]] = {part: [] for part in _GAP_PARTS}
    for record in records:
        if record.outcome == Outcome.OK and len(record.token_times) > 2:
            gaps = np.diff(record.token_times) * 1e3
            first.append(float(gaps[0]))
            over.append(float(gaps[0] - 2 * np.median(gaps[1 : 1 + _NEXT])))
            others.append(gaps[1:])
            for part, seconds in (record.stages or {}).items():
                if part in parts:
                    parts[part].append(seconds * 1e3)
    if not first:
        return None
    itl = np.concatenate(others)
    first_p50, first_p99 = _percentiles(first, 50, 99)
    itl_p99, itl_p999 = _percentiles(itl, 99, 99.9)
    return StreamFigures(
        step=float(np.median(itl)),
        first_gap_p50=first_p50,
        first_gap_p99=first_p99,
        first_over_two_p99=float(np.percentile(over, 99)),
        itl_p99=itl_p99,
        itl_p999=itl_p999,
        together=float((itl < _TOGETHER_MS).mean()),
        gap_parts={part: _percentiles(found, 50, 99) for part, found in parts.items() if found},
    )


def _percentiles(values: list[float] | np.ndarray, lower: float, upper: float) -> tuple[float, float]:
    low, high = np.percentile(values, (lower, upper))
    return float(low), float(high)
