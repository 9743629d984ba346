"""NCCL over sockets: communicators of two processes, or of one, that move bytes of the host's memory.

What matters of the real one is kept. A call is not done when it returns, and what a stream is asked before
that may come first. A send ends when its bytes were received. Work whose peer has gone never ends by itself,
and no state tells of it: `abort` alone ends it. Not kept: a stopped process's streams stop with it here.
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

from baton.device.nccl import UNIQUE_ID_BYTES, NcclError, Result
from baton.device.nccl_line import Moment, NcclLine

RECEIVER, SENDER = 1, 0
_SIZE = struct.Struct("<Q")
_HANDLES = itertools.count(1)
_STREAMS: dict[int, DoubleStream] = {}


class _Mark:
    def __init__(self) -> None:
        self.done = threading.Event()

    def ended(self) -> bool:
        return self.done.is_set()


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

    def after(self, moment: Moment) -> None:
        def wait() -> None:
            while not moment.ended():
                time.sleep(1e-4)

        self.add(wait)

    def moment(self) -> Moment:
        mark = _Mark()
        self.add(mark.done.set)
        return mark

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
        self.fails: Result | None = None  # what every state says from now on
        self.ends: list[DoubleEnds] = []

    def unique_id(self) -> bytes:
        return secrets.token_hex(UNIQUE_ID_BYTES // 2).encode()

    def begin(self, unique_id: bytes, rank: int) -> DoubleEnds:
        made = DoubleEnds(self, unique_id, rank)
        self.ends.append(made)
        return made

    def line(self, unique_id: bytes, rank: int, wake: Callable[[], None], connect_s: float = 5.0) -> NcclLine:
        return NcclLine(lambda: self.begin(unique_id, rank), DoubleStream(), 1 - rank, wake, connect_s)


class DoubleEnds:
    """One end of a communicator."""

    def __init__(self, library: NcclDouble, unique_id: bytes, rank: int) -> None:
        self._library = library
        self._name = "\0nccl-double-" + unique_id[:32].decode()
        self._socket: socket.socket | None = None
        self._aborted = threading.Event()
        self._pending: list[tuple[Callable[[], None], int]] = []
        self._polled = 0
        self._moving = threading.Lock()
        meet = self._listen if rank == RECEIVER else self._call
        self._meeting = threading.Thread(target=meet, name="double-meets", daemon=True)
        self._meeting.start()

    def state(self) -> Result:
        if self._aborted.is_set():
            raise NcclError("state", Result.INVALID_USAGE, "the communicator has ended")
        if self._library.fails is not None:
            return self._library.fails
        if self._socket is None:
            return Result.IN_PROGRESS
        if self._pending and self._polled == 0:
            self._polled = 1
            return Result.IN_PROGRESS
        for work, stream in self._pending:
            _STREAMS[stream].add(work)
        self._pending.clear()
        self._polled = 0
        return Result.SUCCESS

    def send(self, address: int, size: int, peer: int, stream: int) -> None:
        self._pending.append((lambda: self._guarded(self._send, address, size), stream))

    def receive(self, address: int, size: int, peer: int, stream: int) -> None:
        self._pending.append((lambda: self._guarded(self._receive, address, size), stream))

    def abort(self) -> None:
        while self._library.hangs.is_set():
            time.sleep(1e-3)
        self._aborted.set()
        self._meeting.join()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            with self._moving:
                self._socket.close()

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

    @property
    def _there(self) -> socket.socket:
        assert self._socket is not None, "nothing moves before both have met"
        return self._socket

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._there.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    # -- meeting ----------------------------------------------------------------------------------

    def _listen(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self._name)
            listener.listen(1)
            listener.settimeout(0.05)
            while not self._aborted.is_set():
                with contextlib.suppress(TimeoutError):
                    self._socket, _ = listener.accept()
                    self._socket.settimeout(None)
                    return

    def _call(self) -> None:
        while not self._aborted.is_set():
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                caller.connect(self._name)
            except OSError:
                caller.close()
                time.sleep(0.005)
            else:
                self._socket = caller
                return


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
