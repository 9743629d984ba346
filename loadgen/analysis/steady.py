"""The part of a run that says something about the server in its steady state, and whether there is one.

What is watched is the backlog: the requests that are due and have not ended. By Little's law it is the rate
times the mean time in the server, so a server that warms up, tires or falls behind shows in it.

The window begins where the backlog's mean over the rest is known best (MSER: the truncation with the smallest
standard error), and not before as many requests have ended as are under way later: a batch that never filled
was not warm. It ends with the last arrival: what runs on after that runs in an emptier server.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from loadgen.analysis.intervals import student

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_SAMPLES = 400
_SLICES = 10
# A drift counts when it is certain by this and at least so large.
_CERTAINTY = 0.98
# Growth is at least this share of the arrivals: the server does not serve them.
_UNSERVED = 0.02
# A level that moves by this share of its mean is none.
_MOVED = 0.5
_FEWEST = 40

WINDOW_FORMULA = (
    "from the MSER truncation of the backlog, once as many ended as are under way, to the last arrival"
)


class Steadiness(StrEnum):
    """What the backlog does within the window."""

    STEADY = "steady"
    # Arrivals are not served as fast as they come.
    GROWING = "growing"
    # It moves without growing for ever: still warming up, or a server that changes.
    MOVING = "moving"
    # Too few requests to tell.
    SHORT = "too short to tell"


@dataclass(frozen=True, slots=True)
class Window:
    """[since, until) in seconds, and what the backlog does there."""

    since: float
    until: float
    steadiness: Steadiness
    # Requests: the mean backlog, and by how much it grew from the window's start to its end.
    backlog: float
    growth: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.until - self.since


def backlog_at(times: Floats, scheduled: Floats, ended: Floats) -> Floats:
    """How many requests were due and had not ended at each time."""
    due = np.searchsorted(np.sort(scheduled), times, side="right")
    over = np.searchsorted(np.sort(ended), times, side="right")
    return (due - over).astype(np.float64)


def find_window(scheduled: Floats, ended: Floats, *, stationary: bool = True) -> Window:
    """The window of a run; a load that is not meant to be `stationary` is taken whole and not judged."""
    if not len(scheduled):
        return Window(0.0, 0.0, Steadiness.SHORT, 0.0, 0.0)
    first, last = float(scheduled.min()), float(scheduled.max())
    times = np.linspace(first, last, _SAMPLES + 1)[1:]
    backlog = backlog_at(times, scheduled, ended)
    if not stationary or len(scheduled) < _FEWEST:
        return Window(first, last, Steadiness.SHORT, float(backlog.mean()), 0.0)
    half = _SAMPLES // 2
    since = max(float(times[_mser(backlog)]), _filled(ended, float(np.median(backlog[half:]))))
    since = min(since, float(times[half]))
    return judge_window(scheduled, ended, since, last)


def judge_window(scheduled: Floats, ended: Floats, since: float, until: float) -> Window:
    """Says what the backlog does in a window that is given."""
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
    return Window(since, until, steadiness, mean, growth)


def _mser(values: Floats) -> int:
    """Where to cut so that the mean of the rest has the smallest standard error; at most half is cut."""
    rest = np.arange(len(values), 0, -1)
    sums = np.cumsum(values[::-1])[::-1]
    squares = np.cumsum((values**2)[::-1])[::-1]
    errors = (squares - sums**2 / rest) / rest**2
    return int(np.argmin(errors[: len(values) // 2]))


def _filled(ended: Floats, backlog: float) -> float:
    """When as many requests had ended as are under way later."""
    place = min(len(ended) - 1, max(0, math.ceil(backlog) - 1))
    return float(np.partition(ended, place)[place])


def _trend(levels: Floats) -> tuple[float, float, float]:
    """Mean, slope a slice, and the slope's standard error."""
    places = np.arange(len(levels)) - (len(levels) - 1) / 2
    spread = float((places**2).sum())
    slope = float((places * levels).sum()) / spread
    left = levels - levels.mean() - slope * places
    error = math.sqrt(float((left**2).sum()) / (len(levels) - 2) / spread)
    return float(levels.mean()), slope, error
