"""From the host's memory to a tensor anywhere: a buffer that is filled, put, and filled again."""

from __future__ import annotations

import contextlib

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
