"""Times of one loop's steps: the latest few, those of the last second, all together. Torch-free."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

# How many of the latest durations the predictions are made from.
_STEPS_KEPT = 9
_RECENT_S = 1.0


class RecentSteps(NamedTuple):
    """Statistics of the steps that ended within the last second; zeros where none did."""

    steps: int = 0
    tokens: int = 0
    mean_ms: float = 0.0
    p99_ms: float = 0.0


class StepTimes:
    """Durations of steps that have ended, in seconds.

    `expected_s` is the longest of the latest few, as a prediction that the next step is unlikely to exceed by
    much; `typical_s` is their median. Both are 0 before the first step. `busy_s`: the sum of all.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.expected_s = self.typical_s = self.busy_s = 0.0
        self._clock = clock
        self._latest: deque[float] = deque(maxlen=_STEPS_KEPT)
        # (when it ended, its duration, tokens counted by then): the steps of the last second and the one
        # before them.
        self._ended: deque[tuple[float, float, int]] = deque()

    def add(self, seconds: float, tokens: int = 0, steps: int = 1) -> None:
        """Records one more step, or several that took `seconds` each and were seen to end together; 0
        of them: one that was timed at the start, and does not count. `tokens`: the loop's count of computed
        tokens by now."""
        self._latest.append(seconds)
        self.expected_s = max(self._latest)
        self.typical_s = sorted(self._latest)[len(self._latest) // 2]
        self.busy_s += steps * seconds
        now, ended = self._clock(), self._ended
        ended.extend([(now, seconds, tokens)] * steps)
        while len(ended) > 1 and ended[1][0] <= now - _RECENT_S:
            ended.popleft()

    def recent(self) -> RecentSteps:
        """Statistics of the steps that ended within the last second."""
        since = self._clock() - _RECENT_S
        steps = [step for step in self._ended if step[0] > since]
        if not steps:
            return RecentSteps()
        took = sorted(seconds for _, seconds, _ in steps)
        earlier = len(self._ended) - len(steps)
        tokens_before = self._ended[earlier - 1][2] if earlier else 0
        return RecentSteps(
            steps=len(steps),
            tokens=steps[-1][2] - tokens_before,
            mean_ms=sum(took) / len(took) * 1e3,
            p99_ms=took[min(len(took) - 1, int(0.99 * len(took)))] * 1e3,
        )
