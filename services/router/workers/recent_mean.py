"""An exponentially weighted mean over about the last requests."""

from __future__ import annotations

# How many requests it is over: a single one has an error of some percent, since others come and go.
REQUESTS = 128


class RecentMean:
    """Starts at `value`, which counts as so many requests; the first ones after it are averaged equally."""

    def __init__(self, value: float = 0.0, count: int = 0) -> None:
        self.value = value
        self._count = count

    def add(self, value: float) -> None:
        """Takes the value of one more request."""
        self._count = min(REQUESTS, self._count + 1)
        self.value += (value - self.value) / self._count
