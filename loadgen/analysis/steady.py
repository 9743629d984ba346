"""Finds the window of a run in which the server is in its steady state.

The backlog is watched: requests that are due and have not ended. By Little's law it is the rate times the
mean time in the server, so warm-up, slowing down and overload all show in it.

The window begins where the mean of the rest of the backlog has the smallest standard error (MSER), and not
before as many requests have ended as are in flight later. It ends with the last arrival, since the load
decreases after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from loadgen.analysis.intervals import student
from loadgen.common.arrays import Floats

_SAMPLES = 400
_SLICES = 10
# Drift counts if it is significant at this level and at least this large.
_CERTAINTY = 0.98
# Growth of at least this share of the arrivals means overload.
_UNSERVED = 0.02
# A level that moves by at least this share of its mean is not steady.
_MOVED = 0.5
_FEWEST = 40

WINDOW_FORMULA = (
    "from the MSER truncation of the backlog, once as many ended as are under way, to the last arrival"
)


class Steadiness(StrEnum):
    """The behaviour of the backlog within the window."""

    STEADY = "steady"
    # The server is past its capacity.
    GROWING = "growing"
    # The level changes without growing steadily: warm-up, or a server that changes.
    MOVING = "moving"
    # Too few requests.
    SHORT = "too short to tell"


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """The window [since, until) in seconds, and the behaviour of the backlog in it."""

    since: float
    until: float
    steadiness: Steadiness
    # The mean backlog in requests, and its growth from the window's start to its end.
    backlog: float
    growth: float

    @property
    def seconds(self) -> float:
        """Duration of the window in seconds."""
        return self.until - self.since


def backlog_at(times: Floats, scheduled: Floats, ended: Floats) -> Floats:
    """The number of requests that were due and had not ended, at each time."""
    due = np.searchsorted(np.sort(scheduled), times, side="right")
    over = np.searchsorted(np.sort(ended), times, side="right")
    return (due - over).astype(np.float64)


def find_window(scheduled: Floats, ended: Floats, *, stationary: bool = True) -> MeasuredWindow:
    """The window of a run; the whole run, without a verdict, for a load that is not `stationary`."""
    if not len(scheduled):
        return MeasuredWindow(0.0, 0.0, Steadiness.SHORT, 0.0, 0.0)
    first, last = float(scheduled.min()), float(scheduled.max())
    times = np.linspace(first, last, _SAMPLES + 1)[1:]
    backlog = backlog_at(times, scheduled, ended)
    if not stationary or len(scheduled) < _FEWEST:
        return MeasuredWindow(first, last, Steadiness.SHORT, float(backlog.mean()), 0.0)
    half = _SAMPLES // 2
    since = max(float(times[_mser(backlog)]), _filled(ended, float(np.median(backlog[half:]))))
    since = min(since, float(times[half]))
    return judge_window(scheduled, ended, since, last)


def judge_window(scheduled: Floats, ended: Floats, since: float, until: float) -> MeasuredWindow:
    """Judges the backlog in a given window."""
    times = np.linspace(since, until, _SAMPLES + 1)[1:]
    backlog = backlog_at(times, scheduled, ended)
    arrivals = int(((scheduled >= since) & (scheduled <= until)).sum())
    mean, slope, error = _trend(backlog.reshape(_SLICES, -1).mean(axis=1))
    growth = slope * _SLICES
    certain = abs(slope) > student(_CERTAINTY, _SLICES - 2) * error
    steadiness = Steadiness.STEADY
    if arrivals < _FEWEST:
        steadiness = Steadiness.SHORT
    elif certain and abs(growth) > max(_MOVED * mean, 4 * math.sqrt(mean + 1)):
        unserved = growth > _UNSERVED * arrivals
        steadiness = Steadiness.GROWING if unserved else Steadiness.MOVING
    return MeasuredWindow(since, until, steadiness, mean, growth)


def _mser(values: Floats) -> int:
    """The truncation with the smallest standard error of the mean of the rest, at most half."""
    rest = np.arange(len(values), 0, -1)
    sums = np.cumsum(values[::-1])[::-1]
    squares = np.cumsum((values**2)[::-1])[::-1]
    errors = (squares - sums**2 / rest) / rest**2
    return int(np.argmin(errors[: len(values) // 2]))


def _filled(ended: Floats, backlog: float) -> float:
    """The time when as many requests had ended as are in flight later."""
    place = min(len(ended) - 1, max(0, math.ceil(backlog) - 1))
    return float(np.partition(ended, place)[place])


def _trend(levels: Floats) -> tuple[float, float, float]:
    """Mean, slope per slice, and the standard error of the slope."""
    places = np.arange(len(levels)) - (len(levels) - 1) / 2
    spread = float((places**2).sum())
    slope = float((places * levels).sum()) / spread
    left = levels - levels.mean() - slope * places
    error = math.sqrt(float((left**2).sum()) / (len(levels) - 2) / spread)
    return float(levels.mean()), slope, error
