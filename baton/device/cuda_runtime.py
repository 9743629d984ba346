"""The few calls of CUDA's runtime and driver that torch has no word for, bound by ctypes.

They are made in the very libraries that torch has loaded, so both speak of one context. Each raises
`CudaError` where CUDA says no. Addresses are plain integers.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

_LOG = logging.getLogger(__name__)

HANDLE_BYTES = 64
_BUS_ID_BYTES = 32
_TO_ANYWHERE = 4  # cudaMemcpyDefault: the addresses say where they lie
_PORTABLE_MAPPED = 1 | 2
_LAZY_PEER_ACCESS = 1
_ARGUMENTS = 8
_WITHOUT_TIME = 2
_NOT_READY = 600
_BESIDE_THE_DEFAULT = 1  # cudaStreamNonBlocking
_FIRST = -1
_BATCH = "cuMemcpyBatchAsync_v2"
_AS_IN_A_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_ON_A_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_MOST_COPIES = 64


class CudaError(RuntimeError):
    """What CUDA was asked for and did not do."""


@cache
def cuda_driver() -> ctypes.CDLL:
    """OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    """A function that returns 0, or an error's number: CudaError."""
    result = getattr(library, name)(*arguments)
    if result:
        raise CudaError(f"{name}: error {result}")


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, passed by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


_SIGNATURES: dict[str, list[Any]] = {
    "cudaSetDevice": [ctypes.c_int],
    "cudaMalloc": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t],
    "cudaFree": [ctypes.c_void_p],
    "cudaIpcGetMemHandle": [ctypes.POINTER(_Handle), ctypes.c_void_p],
    "cudaIpcOpenMemHandle": [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint],
    "cudaIpcCloseMemHandle": [ctypes.c_void_p],
    "cudaHostRegister": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint],
    "cudaHostUnregister": [ctypes.c_void_p],
    "cudaHostGetDevicePointer": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint],
    "cudaStreamCreateWithPriority": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_int],
    "cudaStreamSynchronize": [ctypes.c_void_p],
    "cudaStreamDestroy": [ctypes.c_void_p],
    "cudaMemcpyAsync": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p],
    "cudaEventCreateWithFlags": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint],
    "cudaEventRecord": [ctypes.c_void_p, ctypes.c_void_p],
    "cudaStreamWaitEvent": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint],
    "cudaEventQuery": [ctypes.c_void_p],
    "cudaEventSynchronize": [ctypes.c_void_p],
    "cudaDeviceGetPCIBusId": [ctypes.c_char_p, ctypes.c_int, ctypes.c_int],
    "cudaDeviceGetByPCIBusId": [ctypes.POINTER(ctypes.c_int), ctypes.c_char_p],
    "cudaDeviceCanAccessPeer": [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int],
}


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: in a stream's order; hints (kind, number) of source and destination."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class _Batch:
    """What a call for many copies is told by."""

    def __init__(self) -> None:
        self.destinations, self.sources, self.sizes = ((ctypes.c_uint64 * _MOST_COPIES)() for _ in range(3))
        self.attributes = _CopyAttributes(order=_AS_IN_A_STREAM)
        self.first = (ctypes.c_size_t * 1)(0)  # the attributes are of all copies from this one on


class CudaRuntime:
    """Loaded once (`cuda_runtime`). OSError where the libraries are not there."""

    def __init__(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        major = str(torch.version.cuda).partition(".")[0]
        self._runtime = ctypes.CDLL(f"libcudart.so.{major}")
        for name, arguments in _SIGNATURES.items():
            getattr(self._runtime, name).argtypes = arguments
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
        self._driver = cuda_driver()
        self._driver.cuLaunchKernel.argtypes = [
            ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3,
        ]  # fmt: skip
        self._driver.cuStreamWriteValue64_v2.argtypes = [
            ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint,
        ]  # fmt: skip
        self._batch: _Batch | None = None
        with contextlib.suppress(AttributeError):
            getattr(self._driver, _BATCH).argtypes = [
                *[ctypes.POINTER(ctypes.c_uint64)] * 3, ctypes.c_size_t, ctypes.POINTER(_CopyAttributes),
                ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t, ctypes.c_void_p,
            ]  # fmt: skip
            self._batch = _Batch()
        # Their values, and where they are. What a kernel has behind ours is 0: Triton's scratch.
        self._arguments = (ctypes.c_uint64 * _ARGUMENTS)()
        start = ctypes.addressof(self._arguments)
        self._places = (ctypes.c_void_p * _ARGUMENTS)(*(start + 8 * n for n in range(_ARGUMENTS)))

    def set_device(self, index: int) -> None:
        """This thread's from now on."""
        self._call("cudaSetDevice", index)

    def allocate(self, size: int) -> int:
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), size)
        return _address(pointer)

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def export(self, address: int) -> bytes:
        """`HANDLE_BYTES` by which another process opens an allocation."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Another process's allocation in this one, for the current device."""
        pointer = ctypes.c_void_p()
        whose = _Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), whose, _LAZY_PEER_ACCESS)
        return _address(pointer)

    def close(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", address)

    def register(self, address: int, size: int) -> int:
        """Lets the GPU reach memory of the host's; the address that it has there."""
        self._call("cudaHostRegister", address, size, _PORTABLE_MAPPED)
        pointer = ctypes.c_void_p()
        self._call("cudaHostGetDevicePointer", ctypes.byref(pointer), address, 0)
        return _address(pointer)

    def unregister(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        """Enqueues a copy between any two places of which one is on a GPU."""
        self._call("cudaMemcpyAsync", destination, source, size, _TO_ANYWHERE, stream)

    def copy_together(
        self, destination: int, sources: Sequence[int], size: int, device: int, stream: int
    ) -> None:
        """Enqueues copies of equal size on one device, whose places there follow each other: by one call
        where the driver knows it (CUDA 13), with no pause between them. 64 at most; one thread at a time."""
        if self._batch is not None and len(sources) > 1:
            try:
                self._copy_batch(self._batch, destination, sources, size, device, stream)
                return
            except CudaError as error:
                _LOG.warning("copies_not_batched", extra={"reason": str(error)})
                self._batch = None
        for n, source in enumerate(sources):
            self.copy(destination + n * size, source, size, stream)

    def _copy_batch(
        self, batch: _Batch, destination: int, sources: Sequence[int], size: int, device: int, stream: int
    ) -> None:
        count = len(sources)
        batch.attributes.hints[:] = (_ON_A_DEVICE, device, _ON_A_DEVICE, device)
        batch.destinations[:count] = [destination + n * size for n in range(count)]
        batch.sources[:count] = list(sources)
        batch.sizes[:count] = [size] * count
        call(
            self._driver, _BATCH,
            batch.destinations, batch.sources, batch.sizes, count, batch.attributes, batch.first, 1, stream,
        )  # fmt: skip

    def event(self) -> int:
        """For its order alone; never destroyed."""
        handle = ctypes.c_void_p()
        self._call("cudaEventCreateWithFlags", ctypes.byref(handle), _WITHOUT_TIME)
        return _address(handle)

    def record(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """What is enqueued from now on begins after the event."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def ended(self, event: int) -> bool:
        result = self._runtime.cudaEventQuery(event)
        if result not in (0, _NOT_READY):
            raise CudaError(f"cudaEventQuery: error {result}")
        return bool(result == 0)

    def wait_for(self, event: int) -> None:
        """Waits until it has come."""
        self._call("cudaEventSynchronize", event)

    def write_value(self, address: int, value: int, stream: int) -> None:
        """Enqueues a store of 8 bytes behind a fence of the whole system: whoever sees it sees all that the
        stream did before."""
        call(self._driver, "cuStreamWriteValue64_v2", stream, address, value, 0)

    def launch(
        self,
        function: int,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        stream: int,
        addresses: tuple[int, ...],
    ) -> None:
        """Enqueues a kernel of the current context; by one thread at a time."""
        self._arguments[: len(addresses)] = list(addresses)
        call(
            self._driver, "cuLaunchKernel",
            function, grid[0], grid[1], 1, threads, 1, 1, shared, stream, self._places, None,
        )  # fmt: skip

    def new_stream(self, *, first: bool = False) -> int:
        """Whose kernels go `first` where the device can choose."""
        pointer = ctypes.c_void_p()
        priority = _FIRST if first else 0
        self._call("cudaStreamCreateWithPriority", ctypes.byref(pointer), _BESIDE_THE_DEFAULT, priority)
        return _address(pointer)

    def finish(self, stream: int) -> None:
        """Waits until all that it was told is done."""
        self._call("cudaStreamSynchronize", stream)

    def end_stream(self, stream: int) -> None:
        """When all that it was told is done."""
        self._call("cudaStreamDestroy", stream)

    def bus_id(self, index: int) -> str:
        """The device's name on this host, the same in every process."""
        name = ctypes.create_string_buffer(_BUS_ID_BYTES)
        self._call("cudaDeviceGetPCIBusId", name, _BUS_ID_BYTES, index)
        return name.value.decode()

    def reaches(self, index: int, bus_id: str) -> bool:
        """Whether a device may write the other's memory: it is that device, or has peer access to it, or this
        process does not see it (CUDA_VISIBLE_DEVICES). Then `open` finds out, which needs not see it."""
        found, can = ctypes.c_int(), ctypes.c_int()
        try:
            self._call("cudaDeviceGetByPCIBusId", ctypes.byref(found), bus_id.encode())
        except CudaError:
            return True
        if found.value != index:
            with contextlib.suppress(CudaError):
                self._call("cudaDeviceCanAccessPeer", ctypes.byref(can), index, found.value)
        return found.value == index or bool(can.value)

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._runtime, name)(*arguments)
        if result:
            why = self._runtime.cudaGetErrorString(result).decode()
            with contextlib.suppress(AttributeError):
                self._runtime.cudaGetLastError()  # it is told here, and to nobody who asks later
            raise CudaError(f"{name}: {why}")


def _address(pointer: ctypes.c_void_p) -> int:
    if pointer.value is None:
        raise CudaError("CUDA gave no address")
    return pointer.value


@cache
def cuda_runtime() -> CudaRuntime:
    return CudaRuntime()
