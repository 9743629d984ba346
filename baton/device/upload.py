"""From the host's memory to tensors anywhere: a buffer that is filled, put, and filled again; and arrays
whose copy nobody waits for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class UploadBuffer:
    """`size` bytes, pinned where `device` is a GPU; copies on a stream of its own. One thread's at a time."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._tensor = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.bytes = self._tensor.numpy().data

    def put(self, target: Tensor, dtype: torch.dtype) -> None:
        """Copies the first `target.numel()` elements of `dtype` into `target` (1-D, contiguous), cast on its
        device. Once it returns they are there, and the buffer may be filled again."""
        source = self._tensor[: target.numel() * dtype.itemsize].view(dtype)
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if dtype is not target.dtype:
                source = source.to(target.device, non_blocking=True)
            target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()


def put_ints(values: npt.NDArray[np.int32], target: Tensor) -> None:
    """Copies the values to the front of `target` (1-D int32); enqueued on the current stream, returns at
    once, and the array may be changed then."""
    host = torch.empty(values.size, dtype=torch.int32, pin_memory=target.device.type == "cuda")
    host.numpy()[:] = values
    target[: values.size].copy_(host, non_blocking=True)


def put_values(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.tensor(values)` on the device; enqueued on the current stream, returns at once.

    The pinned memory is torch's own to give out again, once the copy has ended.
    """
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
