"""A measurement of one arrival rate, and its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import numpy as np

from loadgen.analysis.intervals import correlation_time, freedom_of, wilson
from loadgen.analysis.steady import MeasuredWindow, Steadiness, find_window, judge_window
from loadgen.common.arrays import Flags, Floats

# A probe starts with an empty server; at least this share of it is cut.
CUT = 0.2


class Verdict(StrEnum):
    """The judgement of whether a rate meets the limits."""

    PASS = "pass"
    FAIL = "fail"
    # The backlog grows, so attainment depends on the duration.
    UNSTABLE = "unstable"


@dataclass(frozen=True, slots=True)
class Probe:
    """A point of the curve of attainment over rate."""

    rate: float
    # The rate of the arrivals that occurred, which differs from the nominal one by chance.
    offered: float
    seconds: float
    requests: int
    attainment: float
    # The number of independent draws of the attainment.
    draws: float
    low: float
    high: float
    steadiness: Steadiness
    verdict: Verdict

    @classmethod
    def of(
        cls,
        rate: float,
        goal: float,
        scheduled: Floats,
        ended: Floats,
        good: Flags,
        starts: Floats | None = None,
    ) -> Self:
        """The probe of requests in due order, without those that their client cancelled. `starts`: when the
        first turn of each conversation was due; None: each request is one."""
        if not len(scheduled):
            return cls(rate, rate, 0.0, 0, 0.0, 0.0, 0.0, 1.0, Steadiness.SHORT, Verdict.FAIL)
        window = _window(scheduled, ended)
        inside = scheduled >= window.since
        hits = good[inside].astype(np.float64)
        latency = np.minimum(ended[inside], window.until + 3600.0) - scheduled[inside]
        # Without any miss the correlation time cannot be estimated.
        correlation = max(correlation_time(hits), correlation_time(latency))
        draws = len(hits) / correlation
        share = float(hits.mean())
        low, high = wilson(share, draws, freedom=freedom_of(len(hits), correlation))
        if window.steadiness is Steadiness.GROWING:
            verdict = Verdict.UNSTABLE
        else:
            verdict = Verdict.PASS if share >= goal else Verdict.FAIL
        offered = _offered(rate, len(scheduled), scheduled if starts is None else starts)
        steadiness = window.steadiness
        return cls(rate, offered, window.seconds, len(hits), share, draws, low, high, steadiness, verdict)


def _window(scheduled: Floats, ended: Floats) -> MeasuredWindow:
    window = find_window(scheduled, ended)
    first, last = float(scheduled[0]), float(scheduled[-1])
    cut = first + CUT * (last - first)
    return window if window.since >= cut else judge_window(scheduled, ended, cut, last)


def _offered(rate: float, requests: int, starts: Floats) -> float:
    """Offered rate, by the conversations that began: their last turns are due long after the last one has
    begun, the later the slower the server."""
    span = float(starts[-1] - starts[0]) if len(starts) else 0.0
    return requests / len(starts) * (len(starts) - 1) / span if span > 0 else rate
