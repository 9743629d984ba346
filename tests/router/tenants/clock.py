"""A clock that a test sets."""

from __future__ import annotations


class Clock:
    """A clock of seconds that tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
