"""A token bucket: an amount a minute, of which at most one minute's is saved up."""

from __future__ import annotations

from collections.abc import Callable

_MINUTE_S = 60.0
# Rounding error: a caller that waits exactly `wait_s` is admitted.
_TOLERANCE = 1e-6


class TokenBucket:
    """A token bucket, full at first. More than a whole bucket may be taken from a full one, which then owes
    the rest, so that the rate holds on average whatever the size of a request."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._capacity = float(per_minute)
        self._level = self._capacity
        self._clock = clock
        self._filled_at = clock()

    @property
    def used(self) -> float:
        """Amount that was taken and is not refilled yet."""
        return self._capacity - self._filled()

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` may be taken, if nothing else is taken or given back; 0: now."""
        lacking = min(amount, self._capacity) - self._filled()
        return 0.0 if lacking <= _TOLERANCE else lacking * _MINUTE_S / self._capacity

    def take(self, amount: float) -> None:
        """Takes `amount`. Precondition: `wait_s(amount)` is 0."""
        self._level = self._filled() - amount

    def give_back(self, amount: float) -> None:
        """Returns what was taken and not used."""
        self._level = min(self._capacity, self._filled() + amount)

    def resize(self, per_minute: int) -> None:
        """Changes the rate; what was used so far stays used."""
        used = self._capacity - self._filled()
        self._capacity = float(per_minute)
        self._level = self._capacity - used

    def _filled(self) -> float:
        """Refills the bucket; returns its level now."""
        now = self._clock()
        gained = (now - self._filled_at) * self._capacity / _MINUTE_S
        self._level, self._filled_at = min(self._capacity, self._level + gained), now
        return self._level
