"""Measures how fast waiting requests are placed, while some wait."""

from __future__ import annotations

import math
from collections import deque

# Placements that are remembered: the most of them, and the seconds with waiting requests that they cover.
_MOST, _WINDOW_S = 1024, 30.0
# With fewer the rate counts as unknown.
LEAST_PLACEMENTS = 16
# A longer wait for the next placement counts as this one: it may be a worker's restart.
_LONGEST_GAP_S = 1.0
# Placements are random: this many standard deviations more than on average may follow.
_DEVIATIONS = 4.0


class DrainRate:
    """Counts what is placed while other requests wait, in the unit of `QueueEntry.tokens`.

    Its clock runs only in that time: a lull is no slow queue. The rate is rather too high than too low.
    """

    def __init__(self) -> None:
        # Time and tokens of placements.
        self._placed: deque[tuple[float, float]] = deque(maxlen=_MOST)
        self._clock = 0.0
        # Time in which requests waited since the last placement, up to when it was seen last.
        self._waited_s = 0.0
        self._seen: float | None = None

    def update(self, now: float, *, waiting: bool) -> None:
        """Sets whether requests wait from `now` on, in seconds on any clock."""
        if self._seen is not None:
            self._waited_s += now - self._seen
        self._seen = now if waiting else None

    def placed(self, now: float, tokens: float) -> None:
        """Records that a request of `tokens` tokens was placed while others still wait."""
        self.update(now, waiting=True)
        self._clock += min(self._waited_s, _LONGEST_GAP_S)
        self._waited_s = 0.0
        self._placed.append((self._clock, tokens))
        while self._placed[0][0] < self._clock - _WINDOW_S:
            self._placed.popleft()

    def most_within(self, seconds: float) -> float:
        """Most tokens that may be placed within a time; infinite if that is not known."""
        count = len(self._placed) - 1
        if count < LEAST_PLACEMENTS:
            return math.inf
        lasted = self._placed[-1][0] - self._placed[0][0]
        if lasted <= 0:
            return math.inf
        tokens = sum(tokens for _, tokens in self._placed) - self._placed[0][1]
        return seconds * tokens / lasted * (1 + _DEVIATIONS / math.sqrt(count))
