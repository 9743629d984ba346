"""Statistics of a recorded trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadgen.load.traces import Trace

_PARTS = 60
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Rates per second; lengths in tokens, by percentile."""

    requests: int
    skipped: int
    seconds: float
    mean_rate: float
    peak_rate: float
    # The gamma shape with the gaps' coefficient of variation: 1 is Poisson, less is burstier.
    burstiness: float | None
    input_tokens: dict[str, float]
    output_tokens: dict[str, float]
    # The share of prompt tokens in a prefix of an earlier request: the hit rate of an unlimited cache.
    shared_prefix: float
    # Requests in each sixtieth of the duration.
    rates: list[float]


def facts_of(trace: Trace) -> TraceFacts:
    """Computes the statistics from the entries."""
    times = np.array([entry.at for entry in trace.entries])
    inputs = np.array([entry.input_tokens for entry in trace.entries])
    outputs = np.array([entry.output_tokens for entry in trace.entries])
    seconds = float(times[-1]) if len(times) else 0.0
    counts = np.histogram(times, bins=_PARTS, range=(0.0, max(seconds, 1e-9)))[0]
    rates = counts / max(seconds / _PARTS, 1e-9)
    return TraceFacts(
        requests=len(times),
        skipped=trace.skipped,
        seconds=seconds,
        mean_rate=len(times) / seconds if seconds else 0.0,
        peak_rate=float(rates.max()) if seconds else 0.0,
        burstiness=_burstiness(times),
        input_tokens=_spread(inputs),
        output_tokens=_spread(outputs),
        shared_prefix=shared_prefix(trace),
        rates=[float(rate) for rate in rates],
    )


def shared_prefix(trace: Trace) -> float:
    """The share of prompt tokens whose whole prefix occurred before."""
    seen: set[int] = set()
    hits = total = 0
    for entry in trace.entries:
        total += entry.input_tokens
        fresh, prefix = False, 0
        for before, block in enumerate(entry.blocks):
            # A block's id need not identify its predecessors.
            prefix = hash((prefix, block))
            if prefix in seen and not fresh:
                hits += min(trace.block_tokens, entry.input_tokens - before * trace.block_tokens)
            else:
                fresh = True
                seen.add(prefix)
    return hits / total if total else 0.0


def _burstiness(times: np.ndarray) -> float | None:
    gaps = np.diff(times)
    if len(gaps) < 2 or gaps.mean() == 0 or gaps.std() == 0:
        return None
    return float((gaps.mean() / gaps.std()) ** 2)


def _spread(values: np.ndarray) -> dict[str, float]:
    spread = {f"p{q}": float(np.percentile(values, q)) for q in PERCENTILES}
    return {"mean": float(values.mean()), **spread, "max": float(values.max())}
