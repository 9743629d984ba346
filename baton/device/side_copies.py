"""Writes rows of device arrays by the copy engine, in parallel with the kernels that run there.

`send` only enqueues: on a stream of its own, in order, from pinned memory. On a CPU it writes at once.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SideCopies:
    """Sends rows of `arrays`, tensors with equal numbers of rows, one row of each together and in order: an
    observer of the last array's row sees those of the others.

    Each row has its own pinned buffer until it has been copied, so a second send of the same row blocks until
    the first is done: for microseconds, if at all.
    """

    def __init__(self, *arrays: Tensor) -> None:
        self._arrays = arrays
        self._on_chip = arrays[0].is_cuda
        if self._on_chip:
            self._stream = torch.cuda.Stream(arrays[0].device)  # type: ignore[no-untyped-call]
            self._pinned = [torch.empty(a.shape, dtype=a.dtype, pin_memory=True) for a in arrays]
            self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent = [torch.cuda.Event() for _ in range(arrays[0].shape[0])]  # type: ignore[no-untyped-call]

    def send(self, row: int, *values: Tensor) -> None:
        """`values`: host tensors, one for each array, of the shape of its rows."""
        if not self._on_chip:
            for array, value in zip(self._arrays, values, strict=True):
                array[row].copy_(value)
            return
        self._sent[row].synchronize()
        with torch.cuda.stream(self._stream):
            for array, pinned, value in zip(self._arrays, self._pinned, values, strict=True):
                pinned[row].copy_(value)
                array[row].copy_(pinned[row], non_blocking=True)
            self._sent[row].record()
            self._last.record()

    @property
    def arrived(self) -> bool:
        """Whether everything sent is on the device."""
        return not self._on_chip or bool(self._last.query())  # type: ignore[no-untyped-call]
