"""What the steps of a decode worker depend on, and the mean of it over the time of a request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class DecodeLoad(NamedTuple):
    """A worker's sequences, the tokens of their contexts, and the share of its time that prompts take; at a
    moment or on average."""

    sequences: float = 0
    context_tokens: float = 0
    prefill_share: float = 0.0


class LoadMark(NamedTuple):
    """A moment of a `LoadHistory`: when it was, and the load until then, in load times seconds."""

    at: float
    sum: DecodeLoad


class LoadHistory:
    """A worker's load over time, as the sum of it until now: of two moments that gives the mean between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._load = DecodeLoad()
        self._mark = LoadMark(clock(), DecodeLoad())

    def changed(self, load: DecodeLoad) -> None:
        """The load is this from now on."""
        self._mark = self.mark()
        self._load = load

    def mark(self) -> LoadMark:
        """This moment."""
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
        """The mean load from that moment until now; the load now where that is no time."""
        now = self.mark()
        seconds = now.at - begun.at
        if seconds <= 0:
            return self._load
        return DecodeLoad(
            *((after - before) / seconds for after, before in zip(now.sum, begun.sum, strict=True))
        )
