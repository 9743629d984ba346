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
    """Sequences and context tokens, integrated up to `at`, in seconds of the clock of a `LoadHistory`;
    `computed_s`: seconds of all prompts that the worker had computed by then."""

    at: float
    sequences: float = 0.0
    context_tokens: float = 0.0
    computed_s: float = 0.0


class LoadHistory:
    """Integrates a worker's load over time. The difference of two integrals, divided by the time between
    them, is the mean load of that interval: a request keeps only the one from its beginning."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sequences = self._context_tokens = 0.0
        self._mark = LoadMark(clock())

    def changed(self, sequences: float, context_tokens: float) -> None:
        """Records that so many sequences are decoded from now on, with so many tokens together."""
        self._mark = self.mark()
        self._sequences, self._context_tokens = sequences, context_tokens

    def mark(self, computed_s: float = 0.0) -> LoadMark:
        """The integrals up to now, when the worker has computed prompts of so many seconds in all."""
        now = self._clock()
        seconds = now - self._mark.at
        return LoadMark(
            now,
            self._mark.sequences + seconds * self._sequences,
            self._mark.context_tokens + seconds * self._context_tokens,
            computed_s,
        )

    def mean_since(self, begun: LoadMark, computed_s: float = 0.0) -> DecodeLoad:
        """The mean load between `begun` and now, when the worker has computed prompts of so many seconds in
        all; the current load if no time has passed."""
        now = self.mark(computed_s)
        seconds = now.at - begun.at
        if seconds <= 0:
            return DecodeLoad(self._sequences, self._context_tokens)
        return DecodeLoad(
            (now.sequences - begun.sequences) / seconds,
            (now.context_tokens - begun.context_tokens) / seconds,
            min(1.0, max(0.0, now.computed_s - begun.computed_s) / seconds),
        )
