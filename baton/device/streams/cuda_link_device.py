"""`LinkDevice` on CUDA: allocations exported by IPC handle, and streams that publish counters."""

from __future__ import annotations

import os
import struct
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.device.cuda_runtime import HANDLE_BYTES, CudaError, CudaRuntime, cuda_runtime
from baton.device.shared_memory import SharedMemory
from baton.device.streams.cuda_stream import CudaStream
from baton.device.streams.launch_lock import LaunchLock
from baton.device.streams.link_device import LinkStream, Mapped, Memory

# CUDA suballocates from blocks of this size, and an IPC handle opens the whole block.
_ALLOCATION_BYTES = 2 << 20
# The owner's process id and address, in front of CUDA's handle: CUDA opens no handle of the same process.
_OWNER = struct.Struct("<IQ")


class _ArrayInterface:
    """Device memory as torch accepts it, by address and without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    """A uint8 tensor [size] of this memory, whose owner must outlive the tensor."""
    return torch.as_tensor(_ArrayInterface(address, size), device=device)


class _CudaMemory:
    def __init__(self, size: int, device: torch.device, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        runtime.set_device(device.index)
        try:
            self.address = runtime.allocate(-(-size // _ALLOCATION_BYTES) * _ALLOCATION_BYTES)
        except CudaError as error:
            raise OSError(f"cannot allocate {size} bytes on {device}: {error}") from error
        self.tensor = tensor_at(self.address, size, device)
        self._free = False

    def handle(self) -> bytes:
        return _OWNER.pack(os.getpid(), self.address) + self._runtime.export(self.address)

    def free(self) -> None:
        if not self._free:
            self._free = True
            self._runtime.call("cudaFree", self.address)


class _OwnMemory:
    """Memory of torch's caching allocator: cudaFree would wait for all work on the device, and block every
    thread that launches a kernel meanwhile."""

    def __init__(self, size: int, device: torch.device) -> None:
        try:
            self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
            # Work of the previous owner may still be enqueued on torch's stream; a link's streams do not
            # wait for it.
            torch.cuda.current_stream(device).synchronize()
        except torch.OutOfMemoryError as error:
            raise OSError(f"cannot allocate {size} bytes on {device}: {error}") from error
        self.address = self.tensor.data_ptr()

    def handle(self) -> bytes:
        raise OSError("private memory has no handle")

    def free(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)


class CudaLinkDevice:
    """A GPU, as links use it."""

    def __init__(self, device: torch.device, *, one_of_several: bool = False) -> None:
        """`one_of_several`: of a worker whose steps are launched on several devices. OSError, AttributeError
        where CUDA's libraries lack a function that links need."""
        self.launching: AbstractContextManager[object] = LaunchLock() if one_of_several else nullcontext()
        self._index = int(device.index or 0)
        self.tensors_on = torch.device("cuda", self._index)
        self._runtime = cuda_runtime()
        self._event_pool: list[int] = []
        self.name = self._runtime.bus_id(self._index)

    def reaches(self, name: str) -> bool:
        return self._runtime.reaches(self._index, name)

    def allocate(self, size: int) -> Memory:
        return _CudaMemory(size, self.tensors_on, self._runtime)

    def allocate_own(self, size: int) -> Memory:
        return _OwnMemory(size, self.tensors_on)

    def open(self, handle: bytes) -> Mapped:
        owner, address = _OWNER.unpack_from(handle)
        if owner == os.getpid():
            return Mapped(address, lambda: None)
        self._runtime.set_device(self._index)
        try:
            address = self._runtime.open(handle[_OWNER.size : _OWNER.size + HANDLE_BYTES])
        except CudaError as error:
            raise OSError(f"the receiver's memory cannot be opened on {self.tensors_on}: {error}") from error
        return Mapped(address, partial(self._runtime.call, "cudaIpcCloseMemHandle", address))

    def register(self, memory: SharedMemory) -> Mapped:
        self._runtime.set_device(self._index)
        host = int(memory.bytes.ctypes.data)
        try:
            address = self._runtime.register(host, memory.size)
        except CudaError as error:
            raise OSError(f"cannot register {memory.size} bytes of shared memory: {error}") from error
        return Mapped(address, partial(self._runtime.call, "cudaHostUnregister", host))

    def stream(self, *, high_priority: bool = False) -> LinkStream:
        return CudaStream(self._index, self._event_pool, high_priority=high_priority)

    def host_zeros(self, rows: int, columns: int) -> Tensor:
        return torch.zeros((rows, columns), dtype=torch.int64, pin_memory=True)
