"""The work that this router's requests took of a worker over the last two seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# Seconds over which released slots and prompts are counted.
RECENT_S = 2.0


class PrefillShare:
    """The share of a worker's time that the prompts of this router take, over the last two seconds.
    `siblings`: that of those which other processes of it have sent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.siblings = 0.0
        self._sent: deque[tuple[float, float]] = deque(maxlen=4096)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Records a dispatched prompt of `seconds`."""
        self._sent.append((self._clock(), seconds))
        self._seconds += seconds

    @property
    def own(self) -> float:
        """The share of this process's prompts."""
        since = self._clock() - RECENT_S
        while self._sent and self._sent[0][0] < since:
            self._seconds -= self._sent.popleft()[1]
        return max(0.0, self._seconds) / RECENT_S

    def after(self, seconds: float = 0.0) -> float:
        """Share of all processes, with a further prompt of `seconds`; at most 1."""
        return min(1.0, self.own + self.siblings + seconds / RECENT_S)


class Turnover:
    """Slots of a decode worker that this router's requests release per second, over the last two seconds.
    `siblings`: those that other processes of it release."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.siblings = 0.0
        self._released: deque[float] = deque(maxlen=4096)

    def add(self) -> None:
        """Records that a slot was released."""
        self._released.append(self._clock())

    @property
    def per_second(self) -> float:
        """Slots released per second by all processes."""
        return self.own + self.siblings

    @property
    def own(self) -> float:
        """Slots released per second by this process."""
        since = self._clock() - RECENT_S
        while self._released and self._released[0] < since:
            self._released.popleft()
        return len(self._released) / RECENT_S
