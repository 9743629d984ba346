"""`LinkDevice` on CUDA: allocations of their own, exported by handle, and streams that publish."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.device.cuda_runtime import HANDLE_BYTES, CudaError, CudaRuntime, cuda_runtime
from baton.device.cuda_stream import CudaStream
from baton.device.link_device import Kernel, Line, Memory, Opened, Registered
from baton.device.shared_memory import SharedMemory

# CUDA hands small allocations out of blocks of this size, and a handle opens the whole block.
_WHOLE = 2 << 20
# Process and address of who allocated, before CUDA's handle: CUDA opens none of its own process.
_OWNER = struct.Struct("<IQ")


class _CudaLine(CudaStream):
    """A `Line`."""

    def copy(self, destination: int, source: int, size: int) -> None:
        self._runtime.copy(destination, source, size, self.handle)

    def copy_together(self, destination: int, sources: Sequence[int], size: int) -> None:
        self._runtime.copy_together(destination, sources, size, self._device, self.handle)

    def run(self, work: Callable[[], None]) -> None:
        stream = torch.cuda.ExternalStream(self.handle, self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            work()

    def launch(self, kernel: Kernel, grid: tuple[int, int], addresses: tuple[int, ...]) -> None:
        self._runtime.set_device(self._device)
        self._runtime.launch(kernel.function, grid, kernel.threads, kernel.shared, self.handle, addresses)

    def publish(self, address: int, value: int) -> None:
        self._runtime.set_device(self._device)
        self._runtime.write_value(address, value, self.handle)


class _Span:
    """Device memory as torch takes it over: by its address, without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def span_tensor(address: int, size: int, device: torch.device) -> Tensor:
    """uint8; whose memory it is keeps it longer than the tensor."""
    return torch.as_tensor(_Span(address, size), device=device)


class _CudaMemory:
    def __init__(self, size: int, device: torch.device, runtime: CudaRuntime) -> None:
        self.size = size
        self._runtime = runtime
        runtime.set_device(device.index)
        try:
            self.address = runtime.allocate(-(-size // _WHOLE) * _WHOLE)
        except CudaError as error:
            raise OSError(f"no {size} bytes on {device}: {error}") from error
        self.tensor = span_tensor(self.address, size, device)
        self._free = False

    def handle(self) -> bytes:
        return _OWNER.pack(os.getpid(), self.address) + self._runtime.export(self.address)

    def __getitem__(self, part: slice) -> NDArray[np.uint8]:
        return self.tensor[part].cpu().numpy()

    def free(self) -> None:
        if not self._free:
            self._free = True
            self._runtime.free(self.address)


class _OwnMemory:
    """Torch's, which keeps what it is given back: CUDA's own free waits for all that runs on the device, and
    whoever launches a kernel meanwhile waits with it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        try:
            self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
            # Who had it before may have said more to this stream than is done; ours would not wait for it.
            torch.cuda.current_stream(device).synchronize()
        except torch.OutOfMemoryError as error:
            raise OSError(f"no {size} bytes on {device}: {error}") from error
        self.address = self.tensor.data_ptr()

    def handle(self) -> bytes:
        raise OSError("memory of this process's alone")

    def __getitem__(self, part: slice) -> NDArray[np.uint8]:
        return self.tensor[part].cpu().numpy()

    def free(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)


class _CudaOpened:
    def __init__(self, handle: bytes, device: torch.device, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        owner, address = _OWNER.unpack_from(handle)
        self._ours = owner == os.getpid()
        if self._ours:
            self.address = address
            return
        runtime.set_device(device.index)
        try:
            self.address = runtime.open(handle[_OWNER.size : _OWNER.size + HANDLE_BYTES])
        except CudaError as error:
            raise OSError(f"the receiver's memory cannot be opened on {device}: {error}") from error

    def close(self) -> None:
        if not self._ours:
            self._runtime.close(self.address)


class _CudaRegistered:
    def __init__(self, memory: SharedMemory, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._host = int(memory.bytes.ctypes.data)
        try:
            self.address = runtime.register(self._host, memory.size)
        except CudaError as error:
            raise OSError(f"CUDA does not register {memory.size} bytes of shared memory: {error}") from error

    def release(self) -> None:
        self._runtime.unregister(self._host)


class CudaLinkDevice:
    """A GPU of this process's."""

    def __init__(self, device: torch.device) -> None:
        """OSError where CUDA's libraries lack what links need."""
        self._index = int(device.index or 0)
        self.tensors_on = torch.device("cuda", self._index)
        self._runtime = cuda_runtime()
        self._events: list[int] = []
        self.name = self._runtime.bus_id(self._index)

    def reaches(self, name: str) -> bool:
        return self._runtime.reaches(self._index, name)

    def allocate(self, size: int) -> Memory:
        return _CudaMemory(size, self.tensors_on, self._runtime)

    def allocate_own(self, size: int) -> Memory:
        return _OwnMemory(size, self.tensors_on)

    def open(self, handle: bytes) -> Opened:
        return _CudaOpened(handle, self.tensors_on, self._runtime)

    def register(self, memory: SharedMemory) -> Registered:
        self._runtime.set_device(self._index)
        return _CudaRegistered(memory, self._runtime)

    def line(self, *, first: bool = False) -> Line:
        return _CudaLine(self._index, self._events, first=first)

    def on_host(self, rows: int, columns: int) -> Tensor:
        return torch.zeros((rows, columns), dtype=torch.int64, pin_memory=True)
