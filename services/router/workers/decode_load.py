"""The load of a decode worker, on which the duration of its steps depends, and its mean over an interval."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class DecodeLoad(NamedTuple):
    """Sequences that are decoded, the sum of their context tokens, and the share (0 to 1) of the worker's
    time that prompts take. Current values, or means over an interval."""

    sequences: float = 0
    context_tokens: float = 0
    prefill_share: float = 0.0


class LoadMark(NamedTuple):
    """The integral of a `LoadHistory` up to `at`, in seconds of its clock; `sum`: of each value."""

    at: float
    sum: DecodeLoad


class LoadHistory:
    """Integrates a worker's load over time. The difference of two integrals, divided by the time between
    them, is the mean load of that interval: a request keeps only the one from its beginning."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._load = DecodeLoad()
        self._mark = LoadMark(clock(), DecodeLoad())

    def changed(self, load: DecodeLoad) -> None:
        """Records that the load has this value from now on."""
        self._mark = self.mark()
        self._load = load

    def mark(self) -> LoadMark:
        """The integral up to now."""
        now = self._clock()
        at, (sequences, context_tokens, prefill_share) = self._mark
        load, seconds = self._load, now - at
        return LoadMark(
            now,
            DecodeLoad(
                sequences + seconds * load.sequences,
                context_tokens + seconds * load.context_tokens,
                prefill_share + seconds * load.prefill_share,
            ),
        )

    def mean_since(self, begun: LoadMark) -> DecodeLoad:
        """The mean load between `begun` and now; the current load if no time has passed."""
        now = self.mark()
        seconds = now.at - begun.at
        if seconds <= 0:
            return self._load
        return DecodeLoad(
            *((after - before) / seconds for after, before in zip(now.sum, begun.sum, strict=True))
        )
