"""The lengths of recent outputs, by which blocks are reserved for new sequences."""

from __future__ import annotations

from collections import deque

# Outputs to remember, and how many there must be before they count.
_WINDOW = 256
_ENOUGH = 32
_SHARE = 0.9


class OutputLengths:
    """A sliding window over the output lengths of sequences that ended by themselves."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=_WINDOW)
        self.most: int | None = None  # the length that nine of ten outputs do not exceed; None: too few yet

    def add(self, tokens: int) -> None:
        """Adds the length of one output, in tokens."""
        self._lengths.append(tokens)
        if len(self._lengths) >= _ENOUGH:
            self.most = sorted(self._lengths)[int(_SHARE * (len(self._lengths) - 1))]
