"""Shared host memory as tensors that kernels access in place."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from baton.device.shared_memory import SharedMemory

_PORTABLE_MAPPED = 1 | 2


class HostMemory:
    """Shared memory, registered with CUDA where `device` is a GPU.

    The registration ends with this object, so it must outlive captured graphs that use the memory.
    RuntimeError where the driver refuses.
    """

    def __init__(self, memory: SharedMemory, device: torch.device) -> None:
        self.memory = memory
        self._bytes = torch.from_numpy(memory.bytes)
        if device.type == "cuda":
            address = self._bytes.data_ptr()
            error = _runtime().cudaHostRegister(address, memory.size, _PORTABLE_MAPPED)
            if int(error) != 0:
                raise RuntimeError(f"cannot register {memory.size} bytes of shared memory: {error}")
            weakref.finalize(self, _unregister, address).atexit = False

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """A view of `count` elements at `offset` bytes, which host and kernels share."""
        return self._bytes[offset : offset + count * dtype.itemsize].view(dtype)


def _unregister(address: int) -> None:
    """Called before the memory is unmapped, since its address may be reused."""
    torch.cuda.synchronize()
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:  # noqa: ANN401 (torch gives it no type)
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
