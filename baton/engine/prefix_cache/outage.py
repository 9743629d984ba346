"""Decides when a disk that has failed is tried again. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class Outage:
    """The state of a disk. After a failure it is not in use until a try succeeds; tries are one at a time,
    after pauses that double. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._pause_s = 0.0
        self._retry_at = 0.0
        self._trying = False
        self.reason: str | None = None
        """The reason for which the disk is not in use; None while it is."""

    @property
    def may_try(self) -> bool:
        """True while the disk may be written to."""
        return self.reason is None or (not self._trying and self._clock() >= self._retry_at)

    def tries(self) -> None:
        """Records that it is being written to."""
        self._trying = self.reason is not None

    def failed(self, reason: str) -> None:
        """Records a failure. What was queued before the first one was noticed does not count."""
        if self.reason is None or self._trying:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if self.reason else FIRST_PAUSE_S
            self._retry_at = self._clock() + self._pause_s
            self._trying = False
            self.reason = reason

    def worked(self) -> None:
        """Records a write that succeeded."""
        self.reason, self._trying = None, False
