"""Detects workers that have become silent, on an event loop that may itself be delayed."""

from __future__ import annotations

import time
from collections.abc import Callable

# A worker that is silent for longer is lost. One that stalls for a second is silent for 1.5 s at most, since
# it sends and answers every half second. gRPC's keepalive breaks a dead connection after 2.25 s, which
# leaves time to reach a worker over another one if only its connection is dead.
LIVENESS_TIMEOUT_S = 2.5
# The interval between two checks, in seconds.
CHECK_INTERVAL_S = 0.1
# The most that the time between two checks counts. If this process was stopped or its loop was blocked, a
# worker was not silent: its messages are still to be read.
_LONGEST_INTERVAL_S = 2 * CHECK_INTERVAL_S


class LivenessTimer:
    """Measures the silence of one source of messages. Call `expired` every `CHECK_INTERVAL_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._checked_at = clock()
        self._silent_s = 0.0

    def reset(self) -> None:
        """A message came."""
        self._silent_s = 0.0

    def expired(self) -> bool:
        """Whether the source has been silent for longer than `LIVENESS_TIMEOUT_S`."""
        now = self._clock()
        self._silent_s += min(now - self._checked_at, _LONGEST_INTERVAL_S)
        self._checked_at = now
        return self._silent_s > LIVENESS_TIMEOUT_S
