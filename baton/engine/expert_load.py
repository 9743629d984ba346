"""Measures how evenly the experts of a mixture were taken lately, from counters that steps add to."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.device.streams.cuda_stream import compute_stream
from baton.device.streams.stream import TimedEvent

_WINDOW_S = 60.0
_EACH_S = 1.0


class ExpertLoad:
    """Reads the counters once a second, beside the steps, and remembers a minute of them."""

    def __init__(self, counters: Sequence[Tensor], clock: Callable[[], float] = time.monotonic) -> None:
        """`counters`: of each layer that has experts, rows that took each [E], int64."""
        self._counters = list(counters)
        self._clock = clock
        self._stream = compute_stream(self._counters[0].device)
        self._read: deque[tuple[float, Tensor]] = deque()
        self._under_way: tuple[float, Tensor, TimedEvent] | None = None

    def observe(self) -> None:
        """Begins to read the counters where a second has passed, and takes what has been read. To be called
        often; waits for nothing."""
        now = self._clock()
        if self._under_way is not None:
            began, counts, event = self._under_way
            if not event.query():
                return
            self._read.append((began, counts))
            self._under_way = None
            while len(self._read) > 2 and self._read[1][0] <= now - _WINDOW_S:
                self._read.popleft()
        elif not self._read or now - self._read[-1][0] >= _EACH_S:
            with self._stream.activate():
                counts = self._stream.copy_to_host(torch.stack(self._counters))
                self._under_way = now, counts, self._stream.record_event()

    @property
    def imbalance(self) -> float:
        """Ratio of the rows of a layer's busiest expert to the mean of its experts, over the last minute and
        averaged over the layers; 0 without rows."""
        if len(self._read) < 2:
            return 0.0
        rows = (self._read[-1][1] - self._read[0][1]).double()
        means = rows.mean(1)
        if not bool((means > 0).all()):
            return 0.0
        return float((rows.amax(1) / means).mean())
