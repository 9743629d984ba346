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


def put_ints(arrays: Sequence[npt.NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, by one copy that is enqueued on the current stream; returns at once. Each
    begins on 16 bytes, so that kernels find it aligned however long the others are."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.size // 4) * 4
    host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=True):
        host.numpy()[start : start + array.size] = array.reshape(-1)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.size].view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def put_values(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.tensor(values)` on the device; enqueued on the current stream, returns at once.

    The pinned memory is torch's own to give out again, once the copy has ended.
    """
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
