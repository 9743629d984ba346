"""Judges whether a device that has work makes progress. Torch-free.

A loop that only enqueues never blocks on its device, so a kernel that never ends would go unnoticed: the
worker continues to answer calls, but its streams stop. Progress is therefore judged by what the loop
observes of the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# A device with pending work is hung when it has made no progress for `HUNG_S`, and for `HUNG_STEPS` times as
# long as its current step should take. Where it may wait for another device, a wait that ends at its deadline
# says more than that nothing moves, so the deadline is added.
HUNG_S = 2.0
HUNG_STEPS = 10.0
# The most that the time between two looks counts. A process that was stopped, or blocked elsewhere, has not
# watched its device meanwhile and must not blame it.
_LONGEST_LOOK_S = 0.5


class DeviceWatchdog:
    """Judges one queue of a device. Its owner calls `look` once per iteration of its loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        deadline_s: float | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`clock`: monotonic seconds. `deadline_s`: the longest that kernels of several devices wait for one
        another; None: there is one device. `check`: raises where such a wait has ended at its deadline;
        called at each look."""
        self._hung_s = HUNG_S if deadline_s is None else deadline_s + HUNG_S
        self._check = check
        self._clock = clock
        self._progress: int | None = None
        self._looked_at = clock()
        self.stalled_s = 0.0
        """Seconds for which pending work has been seen to make no progress."""

    def look(self, *, pending: bool, progress: int, expected_step_s: float) -> bool:
        """Returns whether the device is hung.

        `pending`: whether the queue has work that has not ended. `progress`: any number that changes whenever
        the device ends a step. `expected_step_s`: the predicted duration of the step that runs, in seconds.
        Raises what `check` does.
        """
        if self._check is not None:
            self._check()
        now = self._clock()
        since, self._looked_at = now - self._looked_at, now
        if not pending or progress != self._progress:
            # The first look at new work only starts the watch.
            self._progress = progress if pending else None
            self.stalled_s = 0.0
        else:
            self.stalled_s += min(since, _LONGEST_LOOK_S)
        return self.stalled_s > max(self._hung_s, HUNG_STEPS * expected_step_s)
