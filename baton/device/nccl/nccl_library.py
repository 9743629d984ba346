"""NCCL between two processes: the calls that a link makes, bound by ctypes from the library that torch ships.

torch.distributed is not suitable: its groups need a store, and a watchdog ends the process when a peer is
lost.
Creating a blocking `Communicator`, and its first transfer with each peer, wait for the peer without a
deadline; later transfers do not. Calls of a non-blocking one return at once, and `state` reports later
whether they have succeeded.

    id = Nccl().unique_id()                               made by one process and sent to the other
    c = Nccl().communicator(id, rank, 2, blocking=True)   both, in a thread
    c.send(…) / c.receive(…)                              enqueued on a stream
    c.abort()                                             ends kernels that wait; in a thread
"""

from __future__ import annotations

import ctypes
import threading
from enum import IntEnum
from functools import cache

from baton.device.nvidia_libraries import load_library

UNIQUE_ID_BYTES = 128

_LIBRARY = "libnccl.so.2"
_UINT8 = 1
_MAGIC = 0xCAFEBEEF
# The version of `Config`'s layout, which later libraries accept.
_CONFIG_VERSION = 2_28_00
_OLDEST = 2_18_00
_UNDEFINED = -(1 << 31)
_STUCK_S = 0.2


class Result(IntEnum):
    """ncclResult_t: the result of a call, and the state of a communicator."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7


class NcclError(RuntimeError):
    """A call failed; only `abort` may follow on this communicator."""

    def __init__(self, call: str, result: Result, detail: str) -> None:
        super().__init__(f"{call}: {result.name.lower()}: {detail}")
        self.result = result


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.28; unset fields are left to the library."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("name", ctypes.c_char_p),
        ("collnet_enable", ctypes.c_int),
        ("cta_policy", ctypes.c_int),
        ("shrink_share", ctypes.c_int),
        ("nvls_ctas", ctypes.c_int),
        ("channels_per_net_peer", ctypes.c_int),
        ("nvlink_centric", ctypes.c_int),
    )


def _config(blocking: bool, max_ctas: int) -> Config:
    config = Config(ctypes.sizeof(Config), _MAGIC, _CONFIG_VERSION)
    for name, kind in Config._fields_:
        if kind is ctypes.c_int:
            setattr(config, name, _UNDEFINED)
    config.blocking, config.max_ctas = blocking, max_ctas
    return config


class Nccl:
    """The library. RuntimeError where there is none, or it is too old."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        """`library`: loaded and bound; None: the one that torch ships."""
        self._library = library or _load()
        version = ctypes.c_int()
        _check(self._library, None, "ncclGetVersion", self._library.ncclGetVersion(ctypes.byref(version)))
        self.version = version.value  # 2.28.9 is 22809
        if self.version < _OLDEST:
            raise RuntimeError(f"NCCL {self.version} is older than {_OLDEST}")

    def unique_id(self) -> bytes:
        """A new id of a communicator that is about to be made: an address on which this process listens, and
        a secret."""
        made = _UniqueId()
        _check(self._library, None, "ncclGetUniqueId", self._library.ncclGetUniqueId(ctypes.byref(made)))
        return bytes(made)

    def communicator(
        self, unique_id: bytes, rank: int, ranks: int, *, max_ctas: int, blocking: bool = False
    ) -> Communicator:
        """Starts creating one on the calling thread's CUDA device; complete once its `state` is SUCCESS.

        Its kernels use at most `max_ctas` multiprocessors. A `blocking` one is complete on return, which
        waits for the other ranks without a deadline. ValueError for an id of the wrong length, NcclError.
        """
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise ValueError(f"a unique id has {UNIQUE_ID_BYTES} bytes, not {len(unique_id)}")
        handle = ctypes.c_void_p()
        name = _UniqueId.from_buffer_copy(unique_id)
        config = _config(blocking, max_ctas)
        result = self._library.ncclCommInitRankConfig(
            ctypes.byref(handle), ranks, name, rank, ctypes.byref(config)
        )
        _check(self._library, None, "ncclCommInitRankConfig", result)
        return Communicator(self._library, handle)


class Communicator:
    """One rank of a communicator. Not thread-safe, except for `abort`, which may come from another thread at
    any time and waits for a call that has not returned; every later call raises NcclError."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle: ctypes.c_void_p | None = handle
        # Held during every call but the last: once both ends are connected, none of them blocks for long.
        self._lock = threading.Lock()

    def state(self) -> Result:
        """IN_PROGRESS while the last call has not finished; after an error only `abort` may follow."""
        error = ctypes.c_int()
        self.call("ncclCommGetAsyncError", ctypes.byref(error))
        return Result(error.value)

    def send(self, address: int, size: int, peer: int, stream: int) -> None:
        """Enqueues a send of `size` bytes of device memory on the CUDA `stream`; the peer must receive as
        many.

        Where the communicator is non-blocking, work enqueued after it before `state` is SUCCESS may run
        before it.
        """
        self._move("ncclSend", address, size, peer, stream)

    def receive(self, address: int, size: int, peer: int, stream: int) -> None:
        """Enqueues a receive; as `send`. Its kernel waits on the device until the peer has sent."""
        self._move("ncclRecv", address, size, peer, stream)

    def call(self, name: str, *arguments: object) -> None:
        """Calls the library's function `name` with this communicator as its first argument."""
        with self._lock:
            handle = self._open_handle(name)
            _check(self._library, handle, name, getattr(self._library, name)(handle, *arguments))

    def abort(self) -> None:
        """Ends every kernel of this rank and frees its resources, whatever the peer does; idempotent.

        May take long, or never return: call it in a thread that is joined with a deadline, if at all. A call
        that is blocked in another thread, because the device waits for what this ends, is made to return
        first.
        """
        if self._lock.acquire(timeout=_STUCK_S):
            self._lock.release()
        elif self._handle is not None and hasattr(self._library, "ncclCommRevoke"):
            self._library.ncclCommRevoke(self._handle, 0)  # frees nothing that the blocked call needs
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            _check(self._library, None, "ncclCommAbort", self._library.ncclCommAbort(handle))

    def _move(self, call: str, address: int, size: int, peer: int, stream: int) -> None:
        with self._lock:
            handle = self._open_handle(call)
            result = getattr(self._library, call)(
                ctypes.c_void_p(address), ctypes.c_size_t(size), _UINT8, peer, handle, ctypes.c_void_p(stream)
            )
            _check(self._library, handle, call, result)

    def _open_handle(self, call: str) -> ctypes.c_void_p:
        if self._handle is None:
            raise NcclError(call, Result.INVALID_USAGE, "the communicator has ended")
        return self._handle


def _check(library: ctypes.CDLL, handle: ctypes.c_void_p | None, call: str, result: int) -> None:
    """Raises NcclError unless the call succeeded or is in progress."""
    if result not in (Result.SUCCESS, Result.IN_PROGRESS):
        detail = library.ncclGetLastError(handle) or library.ncclGetErrorString(result)
        raise NcclError(call, Result(result), (detail or b"").decode(errors="replace").strip())


@cache
def _load() -> ctypes.CDLL:
    try:
        library = load_library(_LIBRARY)
    except OSError as error:
        raise RuntimeError(str(error)) from error
    library.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        _UniqueId,
        ctypes.c_int,
        ctypes.POINTER(Config),
    ]
    library.ncclGetLastError.restype = ctypes.c_char_p
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library
