"""What this router's requests took of a worker over the last two seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# Released slots and prompts are counted over so many seconds.
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
        """A prompt that takes so long was sent."""
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
        """The share of all, with a further prompt that takes so long; at most 1."""
        return min(1.0, self.own + self.siblings + seconds / RECENT_S)


class Turnover:
    """How many of a decode worker's slots this router's requests release per second, over the last two
    seconds. `siblings`: those that other processes of it release."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.siblings = 0.0
        self._released: deque[float] = deque(maxlen=4096)

    def add(self) -> None:
        """A slot was released."""
        self._released.append(self._clock())

    @property
    def per_second(self) -> float:
        """Of all processes."""
        return self.own + self.siblings

    @property
    def own(self) -> float:
        """Of this process."""
        since = self._clock() - RECENT_S
        while self._released and self._released[0] < since:
            self._released.popleft()
        return len(self._released) / RECENT_S
