"""Short waits that end when they should."""

from __future__ import annotations

import ctypes

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1


def sharpen_timers() -> None:
    """For this thread and those that it starts from now on. Left alone, Linux adds up to 50 µs to each wait,
    to wake others together with it: more than the 20 µs after which an engine looks again."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
