"""Whether a device that has work makes progress, and how long its steps take. Torch-free.

A loop that only enqueues never blocks on its device, so a kernel that never ends would go unnoticed: the
worker continues to answer calls, but its streams stop. Progress is therefore judged by what the loop
observes of the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# A device with pending work is hung when it has made no progress for `HUNG_S`, and for `HUNG_STEPS` times as
# long as its current step should take.
HUNG_S = 2.0
HUNG_STEPS = 10.0
# The most that the time between two looks counts. A process that was stopped, or blocked elsewhere, has not
# watched its device meanwhile and must not blame it.
_LONGEST_LOOK_S = 0.5
# How many of the latest durations `StepTimes` keeps.
_STEPS_KEPT = 9


class StepTimes:
    """Durations of the latest steps, in seconds.

    `expected_s` is the longest, as a prediction that the next step is unlikely to exceed by much; `typical_s`
    is the median. Both are 0 before the first step.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_STEPS_KEPT)
        self.expected_s = 0.0
        self.typical_s = 0.0

    def add(self, seconds: float) -> None:
        """Records one more step."""
        self._seconds.append(seconds)
        self.expected_s = max(self._seconds)
        self.typical_s = sorted(self._seconds)[len(self._seconds) // 2]


class DeviceWatchdog:
    """Judges one queue of a device. Its owner calls `look` once a turn."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._progress: int | None = None
        self._looked_at = clock()
        self.stalled_s = 0.0
        """Seconds for which pending work has been seen to make no progress."""

    def look(self, *, pending: bool, progress: int, expected_step_s: float) -> bool:
        """Returns whether the device is hung.

        `pending`: whether the queue has work that has not ended. `progress`: any number that changes whenever
        the device ends a step. `expected_step_s`: the predicted duration of the step that runs, in seconds.
        """
        now = self._clock()
        since, self._looked_at = now - self._looked_at, now
        if not pending or progress != self._progress:
            # The first look at new work only starts the watch.
            self._progress = progress if pending else None
            self.stalled_s = 0.0
        else:
            self.stalled_s += min(since, _LONGEST_LOOK_S)
        return self.stalled_s > max(HUNG_S, HUNG_STEPS * expected_step_s)
