"""Detects workers that have become silent, on an event loop that may itself be delayed. Starved ones of this
host are waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.base.process_watch import ProcessWatch, process_space
from baton.v1.worker_pb2 import DescribeResponse

# A worker that is silent for longer is lost. One that stalls for a second is silent for 1.5 s at most, since
# it sends and answers every half second. gRPC's keepalive breaks a dead connection after 2.25 s, which
# leaves time to reach a worker over another one if only its connection is dead.
LIVENESS_TIMEOUT_S = 2.5
# The interval between two checks, in seconds.
CHECK_INTERVAL_S = 0.1
# The most that the time between two checks counts. If this process was stopped or its loop was blocked, a
# worker was not silent: its messages are still to be read.
_LONGEST_INTERVAL_S = 2 * CHECK_INTERVAL_S


# Seconds of silence from which on a worker's process is looked at, and seconds of the look after which it is
# judged: in time for `LIVENESS_TIMEOUT_S`.
_LOOK_FROM_S, _LOOK_FOR_S = 1.0, 1.3


class LivenessTimer:
    """Measures the silence of one source of messages. Call `expired` every `CHECK_INTERVAL_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._checked_at = clock()
        self.silent_s = 0.0
        """Seconds without a message at the last check."""

    def reset(self) -> None:
        """Restarts the timeout after a message."""
        self.silent_s = 0.0

    def expired(self) -> bool:
        """True if the source has been silent for longer than `LIVENESS_TIMEOUT_S`."""
        now = self._clock()
        self.silent_s += min(now - self._checked_at, _LONGEST_INTERVAL_S)
        self._checked_at = now
        return self.silent_s > LIVENESS_TIMEOUT_S


class FrontProcess:
    """A worker's front, where it is a process of this host and of this process's PID namespace. One that is
    starved is not lost: its sequences would be computed again on the same loaded machine."""

    def __init__(self, watch: ProcessWatch | None) -> None:
        self._watch = watch

    @classmethod
    def of(cls, described: DescribeResponse) -> FrontProcess:
        here = described.process_id and described.process_space == process_space() != ""
        return cls(ProcessWatch(described.process_id) if here else None)

    def starved(self, silent_s: float) -> bool:
        """True if the process could not run in a silence of `silent_s` seconds, 20 at most. To be called
        every `CHECK_INTERVAL_S`."""
        if self._watch is None:
            return False
        if silent_s < _LOOK_FROM_S:
            self._watch.progressed()
            return False
        self._watch.look()
        return not self._watch.hangs(_LOOK_FOR_S)
