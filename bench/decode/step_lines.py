"""Start and end of each step of a loop: by the GPU's clock, or the host's where that computes."""

from __future__ import annotations

import time

import numpy as np

from bench.decode.clocks import Lines
from bench.decode.engine import DecodeEngine


class StepLines:
    """Records from its construction on, while nothing runs; `turned` is called by the loop's thread."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._engine = engine
        self._reader = engine.clocks()
        self._first = self._seen = engine.ended_steps
        self._tokens = engine.loop.tokens_decoded
        self._own: list[tuple[int, int, int, int]] = []

    @property
    def clock(self) -> str:
        return "host" if self._reader is None else "gpu"

    def turned(self, begun_ns: int) -> None:
        """Records the end of a turn of the loop that began at that time."""
        ended = self._engine.ended_steps
        if self._reader is not None:
            self._reader.look(ended)
        elif ended > self._seen:
            tokens = self._engine.loop.tokens_decoded
            self._own.append((begun_ns, 0, time.monotonic_ns(), tokens - self._tokens))
            self._seen, self._tokens = ended, tokens

    def of(self, first: int, steps: int) -> Lines:
        """The lines of `steps` steps after `first` had ended; no step may be running."""
        lines = self._engine.lines_of(self._reader)
        found = np.array(self._own, np.int64).reshape(-1, 4) if lines is None else lines
        return found[first - self._first :][:steps]
