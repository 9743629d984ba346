"""Measures steps: the total time of all of them, and each of the last second. Torch-free."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from baton.v1.worker_pb2 import RecentSteps

_RECENT_NS = 1_000_000_000


class StepClock:
    """Times the steps of one loop.

    A GPU's step is only enqueued when its call returns. It takes from then, or from the end of the step
    before it, until `ended` counts it. That is polled once a turn, so a single step's time is exact to one
    turn, and the sum over many consecutive ones is exact. Where the loop measures its device's time, that
    counts: a step may be enqueued behind another loop's.
    """

    def __init__(
        self,
        tokens: Callable[[], int],
        ended: Callable[[], int],
        clock_ns: Callable[[], int] = time.monotonic_ns,
        device_s: Callable[[], float] | None = None,
    ) -> None:
        """`tokens`: the loop's count of computed tokens. `ended`: its count of ended steps. `device_s`: the
        seconds that these took on the device; None: not measured."""
        self._tokens = tokens
        self._clock_ns = clock_ns
        self._count = ended
        self._counted = ended()
        self._device_s = device_s
        self._device_counted_s = 0.0 if device_s is None else device_s()
        self.busy_ns = 0
        # When each step that has not ended was enqueued.
        self._under_way: deque[int] = deque()
        self._last_end = 0
        # (when it ended, its duration in ns, tokens counted by then): the steps of the last second and the
        # one before them.
        self._ended: deque[tuple[int, int, int]] = deque()

    def timed(self, step: Callable[[], bool]) -> bool:
        """Runs a step and returns its result; one that returns False did nothing and does not count."""
        begun = self._clock_ns()
        did = step()
        if did:
            self._under_way.append(begun)
        if ended := self._just_ended():
            self._record(ended)
        return did

    def enqueued(self) -> None:
        """Records that a step was enqueued now by other means than `timed`."""
        self._under_way.append(self._clock_ns())

    def _just_ended(self) -> int:
        """How many enqueued steps have ended since the last call."""
        counted = self._count()
        more, self._counted = counted - self._counted, counted
        return min(more, len(self._under_way))

    def _record(self, steps: int) -> None:
        """Records steps that ended one after the other, the last one now."""
        now = self._clock_ns()
        on_device = self._device_ns(steps)
        for left in range(steps, 0, -1):
            begun = max(self._under_way.popleft(), self._last_end)
            took = (now - begun) // left
            self._last_end = begun + took
            if on_device is not None:
                took = min(took, on_device)
            self.busy_ns += took
            self._ended.append((self._last_end, took, self._tokens()))
        while len(self._ended) > 1 and self._ended[1][0] <= now - _RECENT_NS:
            self._ended.popleft()

    def _device_ns(self, steps: int) -> int | None:
        """The mean time on the device of the steps that have just ended."""
        if self._device_s is None:
            return None
        counted, self._device_counted_s = self._device_counted_s, self._device_s()
        return round((self._device_counted_s - counted) * 1e9 / steps)

    def recent(self) -> RecentSteps:
        """Statistics of the steps that ended within the last second."""
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
