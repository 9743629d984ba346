"""The load of a decode worker, on which the duration of its steps depends, and its mean over an interval."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class DecodeLoad(NamedTuple):
    """Sequences that are decoded, the sum of their context tokens, and the share of the worker's time that
    prompts take. Current values, or means over an interval."""

    sequences: float = 0
    context_tokens: float = 0
    prefill_share: float = 0.0


class LoadMark(NamedTuple):
    """Sequences and context tokens, integrated up to `at`, in seconds of the clock of a `LoadHistory`;
    `computed_s`: seconds of all that the worker had computed of prompts by then (`Backlog.computed_s`)."""

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
        """Records the number of sequences decoded from now on, and their context tokens together."""
        self._mark = self.mark()
        self._sequences, self._context_tokens = sequences, context_tokens

    def mark(self, computed_s: float = 0.0) -> LoadMark:
        """The integrals up to now. `computed_s`: see `LoadMark`."""
        now = self._clock()
        seconds = now - self._mark.at
        return LoadMark(
            now,
            self._mark.sequences + seconds * self._sequences,
            self._mark.context_tokens + seconds * self._context_tokens,
            computed_s,
        )

    def mean_since(self, begun: LoadMark, computed_s: float = 0.0) -> DecodeLoad:
        """The mean load between `begun` and now, the current one if no time has passed. `computed_s`: of now,
        see `LoadMark`; where one of both lacks what a sibling process has sent, the share of prompts is below
        0 or far above 1."""
        now = self.mark(computed_s)
        seconds = now.at - begun.at
        if seconds <= 0:
            return DecodeLoad(self._sequences, self._context_tokens)
        return DecodeLoad(
            (now.sequences - begun.sequences) / seconds,
            (now.context_tokens - begun.context_tokens) / seconds,
            (now.computed_s - begun.computed_s) / seconds,
        )
