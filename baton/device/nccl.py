"""NCCL between two processes: the few calls that a link makes, over the library that torch brings.

torch.distributed is no help here: its groups have a store and a watchdog that ends the process when a peer is
gone. A `Communicator` is ours alone. Making a blocking one, and its first move with each peer, wait for the
other without a deadline; later moves wait for nobody. A non-blocking one's calls return at once, and `state`
says later whether they have succeeded.

    id = Nccl().unique_id()                               one process makes it and sends it to the other
    c = Nccl().communicator(id, rank, 2, blocking=True)   both, in a side thread
    c.send(…) / c.receive(…)                              enqueued on a stream
    c.abort()                                             ends kernels that wait; in a side thread
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from enum import IntEnum
from functools import cache
from pathlib import Path

UNIQUE_ID_BYTES = 128

_LIBRARY = "libnccl.so.2"
_UINT8 = 1
_MAGIC = 0xCAFEBEEF
# The layout of `_Config` is this version's; later libraries read it as such.
_CONFIG_VERSION = 2_28_00
_OLDEST = 2_18_00
_UNDEFINED = -(1 << 31)
_STUCK_S = 0.2


class Result(IntEnum):
    """What a call says, and the state of a communicator."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7


class NcclError(RuntimeError):
    """A call failed; the communicator is good for nothing but `abort`."""

    def __init__(self, call: str, result: Result, detail: str) -> None:
        super().__init__(f"{call}: {result.name.lower()}: {detail}")
        self.result = result


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of 2.28; what is not set here is the library's choice."""

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


def _config(blocking: bool, max_ctas: int | None) -> _Config:
    values = [
        _UNDEFINED if kind is ctypes.c_int else None if kind is ctypes.c_char_p else 0
        for _, kind in _Config._fields_
    ]
    config = _Config(*values)
    config.size = ctypes.sizeof(_Config)
    config.magic = _MAGIC
    config.version = _CONFIG_VERSION
    config.blocking = int(blocking)
    if max_ctas is not None:
        config.max_ctas = max_ctas
    return config


class Nccl:
    """The library. Raises RuntimeError where there is none, or one that is too old."""

    def __init__(self) -> None:
        self._library = _load()
        version = ctypes.c_int()
        self._check("ncclGetVersion", self._library.ncclGetVersion(ctypes.byref(version)))
        self.version = version.value  # 2.28.9 is 22809
        if self.version < _OLDEST:
            raise RuntimeError(f"NCCL {self.version} is older than {_OLDEST}")

    def unique_id(self) -> bytes:
        """Names a communicator that is about to be made: an address on which this process listens, and a
        secret. Every call gives another."""
        made = _UniqueId()
        self._check("ncclGetUniqueId", self._library.ncclGetUniqueId(ctypes.byref(made)))
        return bytes(made)

    def communicator(
        self, unique_id: bytes, rank: int, ranks: int, *, max_ctas: int | None = None, blocking: bool = False
    ) -> Communicator:
        """Begins to make one on the calling thread's CUDA device; whole once its `state` is SUCCESS.

        Its kernels use `max_ctas` multiprocessors at most. A `blocking` one is whole on return, which waits
        for the other ranks without a deadline. ValueError for what is no unique id, `NcclError`.
        """
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise ValueError(f"a unique id has {UNIQUE_ID_BYTES} bytes, not {len(unique_id)}")
        handle = ctypes.c_void_p()
        name = _UniqueId.from_buffer_copy(unique_id)
        config = _config(blocking, max_ctas)
        result = self._library.ncclCommInitRankConfig(
            ctypes.byref(handle), ranks, name, rank, ctypes.byref(config)
        )
        self._check("ncclCommInitRankConfig", result)
        return Communicator(self._library, handle)

    def _check(self, call: str, result: int) -> None:
        _check(self._library, None, call, result)


class Communicator:
    """One process's end. One thread at a time calls it; `abort` may come from another at any moment, waits
    for a call that has not returned, and every call after it raises `NcclError`."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle: ctypes.c_void_p | None = handle
        # Held over every call but the end: none waits that is made when the two are connected.
        self._lock = threading.Lock()

    def state(self) -> Result:
        """IN_PROGRESS while the last call goes on; after an error nothing but `abort` helps."""
        with self._lock:
            error = ctypes.c_int()
            self._call("ncclCommGetAsyncError", ctypes.byref(error))
            return Result(error.value)

    def send(self, address: int, size: int, peer: int, stream: int) -> None:
        """Sends `size` bytes of device memory, behind what is on the CUDA `stream`; as many are received.

        What is enqueued behind it on the stream before `state` is SUCCESS may run before it, where the
        communicator is non-blocking.
        """
        with self._lock:
            self._move("ncclSend", address, size, peer, stream)

    def receive(self, address: int, size: int, peer: int, stream: int) -> None:
        """As `send`. Its kernel waits on the device until the peer has sent."""
        with self._lock:
            self._move("ncclRecv", address, size, peer, stream)

    def register(self, address: int, size: int) -> None:
        """Lets the peer's kernels reach this memory directly, for as long as the communicator lives."""
        with self._lock:
            registration = ctypes.c_void_p()
            self._call(
                "ncclCommRegister",
                ctypes.c_void_p(address),
                ctypes.c_size_t(size),
                ctypes.byref(registration),
            )

    def revoke(self) -> None:
        """Ends what runs, and keeps the communicator until `destroy`. `NcclError` where there is none."""
        with self._lock:
            if not hasattr(self._library, "ncclCommRevoke"):
                raise NcclError("ncclCommRevoke", Result.INVALID_USAGE, "this library has no such call")
            self._call("ncclCommRevoke", 0)

    def finalize(self) -> None:
        """Begins the end that both agree on; `destroy` once `state` is SUCCESS."""
        with self._lock:
            self._call("ncclCommFinalize")

    def destroy(self) -> None:
        """After `finalize`. Idempotent, and nothing after `abort`."""
        self._end("ncclCommDestroy")

    def abort(self) -> None:
        """Ends every kernel of this end and frees what it holds, whatever the peer does; idempotent.

        May not return for long, or ever: called in a thread that nobody waits for without a deadline. A call
        that is stuck in another thread, since the device waits for what this ends, is made to return first.
        """
        if self._lock.acquire(timeout=_STUCK_S):
            self._lock.release()
        elif self._handle is not None and hasattr(self._library, "ncclCommRevoke"):
            self._library.ncclCommRevoke(self._handle, 0)  # which frees nothing that the call may still need
        self._end("ncclCommAbort")

    def _end(self, call: str) -> None:
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            _check(self._library, None, call, getattr(self._library, call)(handle))

    def _move(self, call: str, address: int, size: int, peer: int, stream: int) -> None:
        handle = self._whole(call)
        result = getattr(self._library, call)(
            ctypes.c_void_p(address), ctypes.c_size_t(size), _UINT8, peer, handle, ctypes.c_void_p(stream)
        )
        _check(self._library, handle, call, result)

    def _call(self, call: str, *arguments: object) -> None:
        handle = self._whole(call)
        _check(self._library, handle, call, getattr(self._library, call)(handle, *arguments))

    def _whole(self, call: str) -> ctypes.c_void_p:
        if self._handle is None:
            raise NcclError(call, Result.INVALID_USAGE, "the communicator has ended")
        return self._handle


def _check(library: ctypes.CDLL, handle: ctypes.c_void_p | None, call: str, result: int) -> None:
    """A non-blocking call that goes on has not failed."""
    if result not in (Result.SUCCESS, Result.IN_PROGRESS):
        detail = library.ncclGetLastError(handle) or library.ncclGetErrorString(result)
        raise NcclError(call, Result(result), (detail or b"").decode(errors="replace").strip())


@cache
def _load() -> ctypes.CDLL:
    """The library in this process already, else that of the package beside torch."""
    library = None
    for name in (_LIBRARY, *_packaged()):
        try:
            library = ctypes.CDLL(name)
            break
        except OSError:
            continue
    if library is None:
        raise RuntimeError(f"this machine has no {_LIBRARY}")
    library.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        _UniqueId,
        ctypes.c_int,
        ctypes.POINTER(_Config),
    ]
    library.ncclGetLastError.restype = ctypes.c_char_p
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _packaged() -> list[str]:
    """Where the package of NCCL's own has it. Importing nothing: that package is a namespace."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    folders = (
        [] if found is None or found.submodule_search_locations is None else found.submodule_search_locations
    )
    return [str(Path(folder) / "lib" / _LIBRARY) for folder in folders]
