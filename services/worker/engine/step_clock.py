"""How long steps take: all of them in sum, and those of the last second one by one. Torch-free."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from baton.v1.worker_pb2 import RecentSteps

_RECENT_NS = 1_000_000_000


class StepClock:
    """Wraps a loop's step; `tokens` is the loop's own count of what it has computed.

    A step that is only enqueued when its call returns (a GPU's) takes longer than the call: from then, or
    from the end of the one before, until `ended` is seen to count it. That is looked at once a turn: one
    step's time is right within a turn, that of many in a row is right in sum.
    """

    def __init__(
        self,
        tokens: Callable[[], int],
        clock_ns: Callable[[], int] = time.monotonic_ns,
        ended: Callable[[], int] | None = None,
    ) -> None:
        """`ended`: steps that have ended, by the loop's count; None where a call returns with its step."""
        self._tokens = tokens
        self._clock_ns = clock_ns
        self._count = ended
        self._counted = 0 if ended is None else ended()
        self.busy_ns = 0
        # When each that has not ended was enqueued.
        self._under_way: deque[int] = deque()
        self._last_end = 0
        # (when it ended, nanoseconds it took, tokens counted by then): a second's steps and the one before
        # them, so that a busy loop holds no more after a day than after a second.
        self._ended: deque[tuple[int, int, int]] = deque()

    def timed(self, step: Callable[[], bool]) -> bool:
        """Runs a step; only one that did something counts."""
        begun = self._clock_ns()
        did = step()
        if did:
            self._under_way.append(begun)
        if ended := self._just_ended():
            self._take(ended)
        return did

    def _just_ended(self) -> int:
        """How many of those under way have ended since the last look."""
        if self._count is None:
            return len(self._under_way)
        counted = self._count()
        more, self._counted = counted - self._counted, counted
        return min(more, len(self._under_way))

    def _take(self, steps: int) -> None:
        """They ended one after the other, and the last just now."""
        now = self._clock_ns()
        for left in range(steps, 0, -1):
            begun = max(self._under_way.popleft(), self._last_end)
            took = (now - begun) // left
            self._last_end = begun + took
            self.busy_ns += took
            self._ended.append((self._last_end, took, self._tokens()))
        while len(self._ended) > 1 and self._ended[1][0] <= now - _RECENT_NS:
            self._ended.popleft()

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
