"""How many tokens requests turn out to have, so that no slot is given blocks for all it may ask for."""

from __future__ import annotations

from collections import deque

# Requests that are remembered, and how many there must be before they tell anything.
_WINDOW = 256
_ENOUGH = 32
_SHARE = 0.9


class OutputLengths:
    """Of requests that ended by themselves."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=_WINDOW)
        self._most: int | None = None

    def add(self, tokens: int) -> None:
        """One more has ended."""
        self._lengths.append(tokens)
        if len(self._lengths) >= _ENOUGH:
            self._most = sorted(self._lengths)[int(_SHARE * (len(self._lengths) - 1))]

    @property
    def most(self) -> int | None:
        """What nine of ten of them had at most; None while too few have ended."""
        return self._most
