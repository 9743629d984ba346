"""Rows of an array on the device, written by the copy engine beside whatever runs there.

`send` only enqueues: on a stream of its own, in order, from pinned memory. A CPU's twin writes at once.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SideCopies:
    """Sends rows of `arrays`, tensors of as many rows each, all of a row together and in their order: who
    sees what was sent of the last array, sees all of the others.

    A row waits in pinned memory of its own until it has been copied, so the next for the same row waits for
    it: microseconds, and only where the first had not yet been wanted.
    """

    def __init__(self, *arrays: Tensor) -> None:
        self._arrays = arrays
        self._on_chip = arrays[0].is_cuda
        if self._on_chip:
            self._stream = torch.cuda.Stream(arrays[0].device)  # type: ignore[no-untyped-call]
            self._waiting = [torch.empty(a.shape, dtype=a.dtype, pin_memory=True) for a in arrays]
            self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent = [torch.cuda.Event() for _ in range(arrays[0].shape[0])]  # type: ignore[no-untyped-call]

    def send(self, row: int, *values: Tensor) -> None:
        """`values`: one on the host for each array, of that array's row."""
        if not self._on_chip:
            for array, value in zip(self._arrays, values, strict=True):
                array[row].copy_(value)
            return
        self._sent[row].synchronize()
        with torch.cuda.stream(self._stream):
            for array, waiting, value in zip(self._arrays, self._waiting, values, strict=True):
                waiting[row].copy_(value)
                array[row].copy_(waiting[row], non_blocking=True)
            self._sent[row].record()
            self._last.record()

    @property
    def arrived(self) -> bool:
        """Whether all that was sent is on the device."""
        return not self._on_chip or bool(self._last.query())  # type: ignore[no-untyped-call]
