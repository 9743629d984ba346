"""The metrics of one request, each with its formula, since tools define these names differently.

Times count from when a request was due (`scheduled`), not from when it was sent, so that neither a slow
generator nor a stalled server can hide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.common.arrays import Floats
from loadgen.common.errors import LoadgenError
from loadgen.common.record import Record


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of one request in seconds; None where it is not defined."""

    name: str
    title: str
    formula: str
    of: Callable[[Record], float | None]


def ttft(record: Record) -> float | None:
    """Time to first token from the scheduled time, in seconds; None without tokens."""
    return record.token_times[0] - record.scheduled if record.token_times else None


def service_ttft(record: Record) -> float | None:
    """Time to first token from the actual send, as other tools measure it."""
    return record.token_times[0] - record.sent if record.token_times and record.sent is not None else None


def tpot(record: Record) -> float | None:
    """Time per output token, for requests with at least two tokens."""
    times = record.token_times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def e2e(record: Record) -> float | None:
    """Time to the end of the stream."""
    return record.ended - record.scheduled if record.ended is not None else None


def ntpot(record: Record) -> float | None:
    """End-to-end time per output token, in seconds; None without tokens."""
    whole = e2e(record)
    return whole / len(record.token_times) if whole is not None and record.token_times else None


def itl_of(times: Sequence[float]) -> Floats:
    """The gap before each token but the first, in seconds: that of its message to the one before, divided by
    the message's tokens. Their sum is the time from the first token to the last one. `times`: of the tokens'
    arrivals, ascending; those of one message are equal."""
    arrived, counts = np.unique(np.asarray(times, np.float64), return_counts=True)
    gaps = np.diff(arrived, prepend=arrived[:1])
    return np.repeat(gaps / counts, counts)[1:]


def _of_gaps(reduce: Callable[[Floats], float]) -> Callable[[Record], float | None]:
    return lambda record: float(reduce(itl_of(record.token_times))) if len(record.token_times) > 1 else None


def _tbt10(record: Record) -> float | None:
    """Mean of the longest tenth of the gaps between tokens; those within a message are 0."""
    return _longest_tenth(np.diff(record.token_times)) if len(record.token_times) > 1 else None


def _longest_tenth(gaps: Floats) -> float:
    return float(np.sort(gaps)[-max(1, len(gaps) // 10) :].mean())


TTFT = Metric("ttft", "TTFT", "first token - scheduled send", ttft)
TPOT = Metric("tpot", "TPOT", "(last token - first token) / (tokens - 1)", tpot)
E2E = Metric("e2el", "E2E", "end of stream - scheduled send", e2e)
SERVICE_TTFT = Metric("service_ttft", "TTFT from send", "first token - actual send", service_ttft)
NTPOT = Metric("ntpot", "E2E a token", "(end of stream - scheduled send) / tokens", ntpot)
TBT10 = Metric("tbt10", "TBT", "mean of the longest tenth of a request's gaps (Mooncake)", _tbt10)
# Metrics that summaries report.
SUMMED = (TTFT, TPOT, E2E, TBT10, NTPOT, SERVICE_TTFT)
ITL_FORMULA = (
    "of each token after the first: the gap between its message and the one before / tokens of its message"
)
LAG_FORMULA = "actual send - scheduled send: the generator's own"
READ_LAG_FORMULA = (
    "read here - come to this machine, of each request's first and last token: the generator's own"
)


def _percentile(percentile: float) -> Callable[[Floats], float]:
    return lambda gaps: float(np.percentile(gaps, percentile))


_GAPS: dict[str, Callable[[Floats], float]] = {
    "itl_mean": np.mean,
    "itl_max": np.max,
    **{f"itl_p{percentile:g}": _percentile(percentile) for percentile in (50, 90, 95, 99, 99.9)},
}
# Metrics that can have limits.
LIMITABLE: dict[str, Metric] = {
    **{metric.name: metric for metric in SUMMED},
    **{
        name: Metric(name, name.replace("_", " ").upper(), f"{name[4:]} of a request's own ITL", _of_gaps(of))
        for name, of in _GAPS.items()
    },
}
_ALIASES = {"e2e": "e2el", "itl": "itl_mean"}


def limitable(name: str) -> Metric:
    """The metric of a limit; LoadgenError where there is none of that name."""
    metric = LIMITABLE.get(_ALIASES.get(name, name))
    if metric is None:
        raise LoadgenError(
            f"no metric is called {name!r}; limits may be set on {', '.join(sorted(LIMITABLE))}"
        )
    return metric
