"""How long steps take: all of them in sum, and those of the last second one by one. Torch-free."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from baton.v1.worker_pb2 import RecentSteps

_RECENT_NS = 1_000_000_000


class StepClock:
    """Wraps a loop's step; `tokens` is the loop's own count of what it has computed."""

    def __init__(self, tokens: Callable[[], int], clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._tokens = tokens
        self._clock_ns = clock_ns
        self.busy_ns = 0
        # (when it ended, nanoseconds it took, tokens counted by then): a second's steps and the one before
        # them, so that a busy loop holds no more after a day than after a second.
        self._ended: deque[tuple[int, int, int]] = deque()

    def timed(self, step: Callable[[], bool]) -> bool:
        """Runs a step; only one that did something counts."""
        begun = self._clock_ns()
        did = step()
        if did:
            ended = self._clock_ns()
            self.busy_ns += ended - begun
            self._ended.append((ended, ended - begun, self._tokens()))
            while len(self._ended) > 1 and self._ended[1][0] <= ended - _RECENT_NS:
                self._ended.popleft()
        return did

    @property
    def remembered(self) -> int:
        """How many steps are kept one by one."""
        return len(self._ended)

    def recent(self) -> RecentSteps:
        """The steps that ended within the last second."""
        since = self._clock_ns() - _RECENT_NS
        steps = [step for step in self._ended if step[0] > since]
        if not steps:
            return RecentSteps()
        took = sorted(ns for _, ns, _ in steps)
        earlier = len(self._ended) - len(steps)
        tokens_before = self._ended[earlier - 1][2] if earlier else 0
        return RecentSteps(
            steps=len(steps),
            tokens=steps[-1][2] - tokens_before,
            mean_ms=sum(took) / len(took) / 1e6,
            p99_ms=took[min(len(took) - 1, int(0.99 * len(took)))] / 1e6,
        )
