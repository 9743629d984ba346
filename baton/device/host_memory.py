"""Shared host memory as tensors that kernels read and write where it is."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from baton.device.shared_memory import SharedMemory

_PORTABLE_MAPPED = 1 | 2


class HostMemory:
    """A worker's shared memory, registered with CUDA where `device` is a GPU; on a CPU it is just memory.

    Whoever captures kernels that use the memory keeps this object: the registration ends with it. Raises
    RuntimeError where the driver refuses.
    """

    def __init__(self, memory: SharedMemory, device: torch.device) -> None:
        self.memory = memory
        self._bytes = torch.from_numpy(memory.bytes)
        if device.type == "cuda":
            address = self._bytes.data_ptr()
            error = _runtime().cudaHostRegister(address, memory.size, _PORTABLE_MAPPED)
            if int(error) != 0:
                raise RuntimeError(f"CUDA does not register {memory.size} bytes of shared memory: {error}")
            weakref.finalize(self, _unregister, address).atexit = False

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements at `offset` bytes, the same memory for host and kernels."""
        return self._bytes[offset : offset + count * dtype.itemsize].view(dtype)


def _unregister(address: int) -> None:
    """Before the memory is unmapped: its address may be given out again."""
    torch.cuda.synchronize()
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:  # noqa: ANN401 (torch gives it no type)
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
