"""NCCL over sockets: communicators of two processes, or of one, that move bytes of the host's memory.

What matters of the real one is kept. Making one waits for the peer. A move is not done when its call returns;
a send ends when its bytes were received. Work whose peer has gone never ends by itself, and no state reports
it: only `abort` ends it. Not kept: a stopped process's streams stop with it here.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from baton.device.nccl.nccl_channel import NcclChannel
from baton.device.nccl.nccl_library import UNIQUE_ID_BYTES, NcclError, Result
from baton.device.streams.stream import Event, Stream

RECEIVER, SENDER = 1, 0
_SIZE = struct.Struct("<Q")
_HANDLES = itertools.count(1)
_STREAMS: dict[int, DoubleStream] = {}


class _Mark:
    handle = 0

    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        self.done.wait()


class DoubleStream:
    """Work in its order, by a thread, which is there while there is work."""

    def __init__(self) -> None:
        self.handle = next(_HANDLES)
        self._work: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._at_work = False
        _STREAMS[self.handle] = self

    def add(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._work.append(work)
            if self._at_work:
                return
            self._at_work = True
        threading.Thread(target=self._run, name="double-stream", daemon=True).start()

    def wait_event(self, event: Event) -> None:
        def wait() -> None:
            while not event.query():
                time.sleep(1e-4)

        self.add(wait)

    def record_event(self) -> Event:
        mark = _Mark()
        self.add(mark.done.set)
        return mark

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def close(self) -> None:
        _STREAMS.pop(self.handle, None)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._work:
                    self._at_work = False
                    return
                work = self._work.popleft()
            work()


class NcclDouble:
    """One process's library; its faults are the tests'."""

    def __init__(self) -> None:
        self.hangs = threading.Event()  # while set, an abort does not return
        self.fails: Result | None = None  # the result of every later state query
        self.ends: list[DoubleEnds] = []
        self.streams: dict[int, DoubleStream] = {}  # by rank, of the channel made last
        self.meeting = 0  # threads that wait for a peer

    def unique_id(self) -> bytes:
        return secrets.token_hex(UNIQUE_ID_BYTES // 2).encode()

    def meet(self, unique_id: bytes, rank: int, given_up: Callable[[], bool]) -> DoubleEnds:
        self.meeting += 1
        try:
            made = DoubleEnds(self, unique_id, rank, given_up)
            self.ends.append(made)
            return made
        finally:
            self.meeting -= 1

    def channel(
        self,
        unique_id: bytes,
        rank: int,
        wake: Callable[[], None],
        launching: AbstractContextManager[object] | None = None,
    ) -> NcclChannel:
        def connect(stream: Stream, given_up: Callable[[], bool]) -> DoubleEnds:
            return self.meet(unique_id, rank, given_up)

        stream = self.streams[rank] = DoubleStream()
        return NcclChannel(connect, stream, 1 - rank, wake, launching)


class DoubleEnds:
    """One end of a communicator; made when the other is."""

    def __init__(
        self, library: NcclDouble, unique_id: bytes, rank: int, given_up: Callable[[], bool]
    ) -> None:
        """NcclError where the other end is given up, or the library has failed."""
        self._library = library
        self.rank = rank
        self._name = "\0nccl-double-" + unique_id[:32].decode()
        self._aborted = threading.Event()
        self._moving = threading.Lock()
        if library.fails is not None:
            raise NcclError("init", library.fails, "the double was set to fail")
        self._there = self._listen(given_up) if rank == RECEIVER else self._call(given_up)

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def state(self) -> Result:
        if self.aborted:
            raise NcclError("state", Result.INVALID_USAGE, "the communicator has ended")
        return Result.SUCCESS if self._library.fails is None else self._library.fails

    def send(self, address: int, size: int, peer: int, stream: int) -> None:
        self._enqueue(self._send, address, size, stream)

    def receive(self, address: int, size: int, peer: int, stream: int) -> None:
        self._enqueue(self._receive, address, size, stream)

    def _enqueue(self, move: Callable[[int, int], None], address: int, size: int, stream: int) -> None:
        if self.state() is not Result.SUCCESS:
            raise NcclError("move", self.state(), "the communicator has failed")
        _STREAMS[stream].add(lambda: self._guarded(move, address, size))

    def abort(self) -> None:
        while self._library.hangs.is_set():
            time.sleep(1e-3)
        self._aborted.set()
        with contextlib.suppress(OSError):
            self._there.shutdown(socket.SHUT_RDWR)
        with self._moving:
            self._there.close()

    # -- the "device" -----------------------------------------------------------------------------

    def _guarded(self, move: Callable[[int, int], None], address: int, size: int) -> None:
        """A peer that has gone is waited for, until the abort."""
        try:
            with self._moving:
                if not self._aborted.is_set():
                    move(address, size)
        except (OSError, EOFError):
            self._aborted.wait()

    def _send(self, address: int, size: int) -> None:
        (wanted,) = _SIZE.unpack(self._exactly(_SIZE.size))
        if wanted != size:
            raise EOFError("other sizes: both wait for ever")
        self._there.sendall(_memory(address, size))
        self._exactly(1)

    def _receive(self, address: int, size: int) -> None:
        self._there.sendall(_SIZE.pack(size))
        memory, filled = _memory(address, size), 0
        while filled < size:
            count = self._there.recv_into(memory[filled:], min(size - filled, 1 << 16))
            if not count:
                raise EOFError
            filled += count
        self._there.sendall(b"!")

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._there.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    # -- meeting ----------------------------------------------------------------------------------

    def _listen(self, given_up: Callable[[], bool]) -> socket.socket:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self._name)
            listener.listen(1)
            listener.settimeout(0.05)
            while not given_up():
                with contextlib.suppress(TimeoutError):
                    there, _ = listener.accept()
                    there.settimeout(None)
                    return there
        raise NcclError("init", Result.REMOTE_ERROR, "no peer came")

    def _call(self, given_up: Callable[[], bool]) -> socket.socket:
        while not given_up():
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                caller.connect(self._name)
            except OSError:
                caller.close()
                time.sleep(0.005)
            else:
                return caller
        raise NcclError("init", Result.REMOTE_ERROR, "no peer came")


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
