"""The calls of CUDA's runtime and driver that torch does not expose, bound by ctypes.

They use the libraries that torch has loaded, so both share one context. Each raises `CudaError` where CUDA
returns an error. Addresses and handles are plain integers.
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
_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the addresses say which memory they are in
_PORTABLE_MAPPED = 1 | 2
_LAZY_PEER_ACCESS = 1
_ARGUMENTS = 8
_DISABLE_TIMING = 2
_NOT_READY = 600
_LAZY_LOADING = 2  # CU_MODULE_LAZY_LOADING
_PEER_ACCESS_ALREADY_ENABLED = 704
_NON_BLOCKING = 1  # cudaStreamNonBlocking: does not synchronize with the default stream
_HIGHEST_PRIORITY = -1
_BATCH = "cuMemcpyBatchAsync_v2"
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_LOCATION_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_MAX_COPIES = 64


class CudaError(RuntimeError):
    """A CUDA call failed; the message names the call and the error."""


@cache
def cuda_driver() -> ctypes.CDLL:
    """The driver's library. OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Calls a function that returns 0, or an error code, for which it raises CudaError."""
    result = getattr(library, name)(*arguments)
    if result:
        raise CudaError(f"{name}: error {result}")


class _Handle(ctypes.Structure):
    """The struct cudaIpcMemHandle_t, passed by value."""

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
    "cudaDeviceEnablePeerAccess": [ctypes.c_int, ctypes.c_uint],
}


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: source access order; location hints (type, id) of source and destination."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class _Batch:
    """Argument arrays of one batched copy, reused by every call."""

    def __init__(self) -> None:
        self.destinations, self.sources, self.sizes = ((ctypes.c_uint64 * _MAX_COPIES)() for _ in range(3))
        self.attributes = _CopyAttributes(order=_STREAM_ORDER)
        self.first = (ctypes.c_size_t * 1)(0)  # the attributes apply to all copies from this index on


class CudaRuntime:
    """CUDA's runtime and driver; `cuda_runtime` loads them once."""

    def __init__(self, runtime: ctypes.CDLL, driver: ctypes.CDLL) -> None:
        self._runtime = runtime
        self._driver = driver
        self._batch = _Batch() if hasattr(driver, _BATCH) else None
        # Kernel arguments and their addresses. Parameters behind ours are 0: Triton's scratch memory.
        self._arguments = (ctypes.c_uint64 * _ARGUMENTS)()
        start = ctypes.addressof(self._arguments)
        self._places = (ctypes.c_void_p * _ARGUMENTS)(*(start + 8 * n for n in range(_ARGUMENTS)))

    def set_device(self, index: int) -> None:
        """Makes it the calling thread's current device."""
        self.call("cudaSetDevice", index)

    def allocate(self, size: int) -> int:
        """Device memory, to be freed by "cudaFree"."""
        return self._create("cudaMalloc", size)

    def export(self, address: int) -> bytes:
        """An IPC handle, `HANDLE_BYTES` long, by which another process opens an allocation."""
        handle = _Handle()
        self.call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Maps another process's allocation for the current device, until "cudaIpcCloseMemHandle"; returns
        its address here."""
        whose = _Handle.from_buffer_copy(handle)
        return self._create("cudaIpcOpenMemHandle", whose, _LAZY_PEER_ACCESS)

    def register(self, address: int, size: int) -> int:
        """Maps host memory for the GPU, until "cudaHostUnregister"; returns its address on the device."""
        self.call("cudaHostRegister", address, size, _PORTABLE_MAPPED)
        return self._create("cudaHostGetDevicePointer", address, 0)

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        """Enqueues a copy between two addresses, at least one of which is on a GPU."""
        self.call("cudaMemcpyAsync", destination, source, size, _MEMCPY_DEFAULT, stream)

    def copy_batch(
        self, destination: int, sources: Sequence[int], size: int, device: int, stream: int
    ) -> None:
        """Enqueues at most 64 copies of equal size on one device, to consecutive destinations: by one call
        where the driver has it (CUDA 13), which leaves no gap between them. Not thread-safe."""
        if self._batch is not None and len(sources) > 1:
            try:
                self._enqueue_batch(self._batch, destination, sources, size, device, stream)
                return
            except CudaError as error:
                _LOG.warning("batched_copy_unavailable", extra={"reason": str(error)})
                self._batch = None
        for n, source in enumerate(sources):
            self.copy(destination + n * size, source, size, stream)

    def _enqueue_batch(
        self, batch: _Batch, destination: int, sources: Sequence[int], size: int, device: int, stream: int
    ) -> None:
        count = len(sources)
        batch.attributes.hints[:] = (_LOCATION_DEVICE, device, _LOCATION_DEVICE, device)
        batch.destinations[:count] = [destination + n * size for n in range(count)]
        batch.sources[:count] = list(sources)
        batch.sizes[:count] = [size] * count
        call(
            self._driver, _BATCH,
            batch.destinations, batch.sources, batch.sizes, count, batch.attributes, batch.first, 1, stream,
        )  # fmt: skip

    def create_event(self) -> int:
        """An event without a time stamp; it is never destroyed."""
        return self._create("cudaEventCreateWithFlags", _DISABLE_TIMING)

    def query_event(self, event: int) -> bool:
        """True once the work before the event has finished."""
        result = self._runtime.cudaEventQuery(event)
        if result not in (0, _NOT_READY):
            raise CudaError(f"cudaEventQuery: error {result}")
        return bool(result == 0)

    def write_value(self, address: int, value: int, stream: int) -> None:
        """Enqueues a store of 8 bytes behind a system-wide fence: an observer of it sees the effects of all
        earlier work of the stream."""
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
        """Enqueues a kernel of the current context. Not thread-safe."""
        self._arguments[:] = [*addresses, *[0] * (_ARGUMENTS - len(addresses))]
        call(
            self._driver, "cuLaunchKernel",
            function, grid[0], grid[1], 1, threads, 1, 1, shared, stream, self._places, None,
        )  # fmt: skip

    def create_stream(self, *, high_priority: bool = False) -> int:
        """Creates a non-blocking stream and returns its handle."""
        priority = _HIGHEST_PRIORITY if high_priority else 0
        return self._create("cudaStreamCreateWithPriority", _NON_BLOCKING, priority)

    def bus_id(self, index: int) -> str:
        """The device's PCI bus id, the same in every process of this host."""
        name = ctypes.create_string_buffer(_BUS_ID_BYTES)
        self.call("cudaDeviceGetPCIBusId", name, _BUS_ID_BYTES, index)
        return name.value.decode()

    def reaches(self, index: int, bus_id: str) -> bool:
        """True if device `index` may write the memory of the device with this bus id: it is the same device,
        or has peer access to it, or this process does not see that device (CUDA_VISIBLE_DEVICES); `open`,
        which need not see it, finds out then."""
        found, can = ctypes.c_int(), ctypes.c_int()
        try:
            self.call("cudaDeviceGetByPCIBusId", ctypes.byref(found), bus_id.encode())
        except CudaError:
            return True
        if found.value != index:
            with contextlib.suppress(CudaError):
                self.call("cudaDeviceCanAccessPeer", ctypes.byref(can), index, found.value)
        return found.value == index or bool(can.value)

    def loads_lazily(self) -> bool:
        """True if this process loads a kernel when it is first launched. CUDA must be initialised."""
        mode = ctypes.c_int()
        call(self._driver, "cuModuleGetLoadingMode", ctypes.byref(mode))
        return mode.value == _LAZY_LOADING

    def enable_peer_access(self, index: int, other: int) -> bool:
        """Lets kernels of device `index` address the memory of another by the addresses that it has there, as
        far as "cudaMalloc" allocated it; returns False where the devices cannot. Makes `index` the current
        device."""
        can = ctypes.c_int()
        self.call("cudaDeviceCanAccessPeer", ctypes.byref(can), index, other)
        if not can.value:
            return False
        self.set_device(index)
        result = self._runtime.cudaDeviceEnablePeerAccess(other, 0)
        if result not in (0, _PEER_ACCESS_ALREADY_ENABLED):
            raise CudaError(f"cudaDeviceEnablePeerAccess: error {result}")
        if result:
            self._clear_error()
        return True

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the runtime. CudaError where it fails."""
        result = getattr(self._runtime, name)(*arguments)
        if result:
            why = self._runtime.cudaGetErrorString(result).decode()
            self._clear_error()
            raise CudaError(f"{name}: {why}")

    def _clear_error(self) -> None:
        """Clears the last error, so that no later call reports it."""
        with contextlib.suppress(AttributeError):
            self._runtime.cudaGetLastError()

    def _create(self, name: str, *arguments: object) -> int:
        """Calls a function that returns a handle or an address through its first parameter."""
        pointer = ctypes.c_void_p()
        self.call(name, ctypes.byref(pointer), *arguments)
        if pointer.value is None:
            raise CudaError(f"{name}: CUDA returned a null pointer")
        return pointer.value


@cache
def cuda_runtime() -> CudaRuntime:
    """Returns this process's only instance. Raises OSError if a library is missing."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    major = str(torch.version.cuda).partition(".")[0]
    runtime = ctypes.CDLL(f"libcudart.so.{major}")
    for name, arguments in _SIGNATURES.items():
        getattr(runtime, name).argtypes = arguments
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    driver = cuda_driver()
    driver.cuLaunchKernel.argtypes = [
        ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3,
    ]  # fmt: skip
    driver.cuStreamWriteValue64_v2.argtypes = [
        ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint,
    ]  # fmt: skip
    with contextlib.suppress(AttributeError):  # an older driver
        getattr(driver, _BATCH).argtypes = [
            *[ctypes.POINTER(ctypes.c_uint64)] * 3, ctypes.c_size_t, ctypes.POINTER(_CopyAttributes),
            ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t, ctypes.c_void_p,
        ]  # fmt: skip
    return CudaRuntime(runtime, driver)
