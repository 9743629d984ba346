"""Copies from host memory to tensors on any device: through a reusable buffer, or asynchronously."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.device.streams.cuda_stream import compute_stream


class UploadBuffer:
    """`size` bytes, pinned where `device` is a GPU, with streams of its own, one for each device that it is
    copied to. Not thread-safe."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._tensor = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._streams = {device: compute_stream(device)}
        self.bytes = self._tensor.numpy().data

    def put(self, target: Tensor, dtype: torch.dtype) -> None:
        """Copies the buffer's first `target.numel()` elements, of `dtype`, into `target` (1-D, contiguous),
        casting on its device. Blocks until done, so the buffer may be reused."""
        self.copy(self.view(dtype, target.numel()), target)

    def view(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """The buffer's first elements as a tensor of that shape."""
        return self._tensor[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies a part of a `view` into `target`, of the same shape, casting on its device. Blocks until
        done."""
        stream = self._streams.get(target.device)
        if stream is None:
            # A copy is ordered by its target's device, so an event on another one would not wait for it.
            stream = self._streams[target.device] = compute_stream(target.device)
        with stream.activate():
            if source.dtype is not target.dtype:
                source = source.to(target.device, non_blocking=True)
            target.copy_(source, non_blocking=True)
            stream.record_event().synchronize()


def put_ints(values: npt.NDArray[np.int32], target: Tensor) -> None:
    """Enqueues a copy of the values to the front of `target` (1-D int32) on the current stream; the array may
    be changed at once."""
    host = torch.empty(values.size, dtype=torch.int32, pin_memory=target.device.type == "cuda")
    host.numpy()[:] = values
    target[: values.size].copy_(host, non_blocking=True)


def put_values(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.tensor(values)` on the device; enqueued on the current stream, returns at once.

    torch reuses the pinned memory once the copy has finished.
    """
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
