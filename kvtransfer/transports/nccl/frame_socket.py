"""Frames over a TCP socket that the loop reads and writes itself, for links whose bytes travel otherwise.

    length u32 | message        one after another

No thread or lock is between a frame and the loop: over loopback a frame takes 20 µs. When the loop is about
to sleep (`busy_poll`), a thread waits for the socket in its place and wakes it."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from baton.base.errors import BatonError, ErrorKind
from kvtransfer.protocol.frames import HEADER_BYTES, MAX_COMMIT_BYTES, FrameError

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = MAX_COMMIT_BYTES + HEADER_BYTES
_READ = 1 << 16
# How long both ends poll within microseconds after the last frame.
BUSY_S = 0.002


class FrameSocket:
    """One end of the connection. Owned by the loop; the thread only waits."""

    def __init__(
        self, sock: socket.socket, bound: int, wake: Callable[[], None], peer: str, busy_s: float = BUSY_S
    ) -> None:
        """Owns the socket from now on. `bound`: how many frames may wait for the peer to read. `peer`: its
        name in errors."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._busy_s = busy_s
        self._bound = bound
        self._wake = wake
        self._peer = peer
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._broken: BatonError | None = None
        self._closed = False
        self._busy_until = 0.0
        self._watch = threading.Event()
        threading.Thread(target=self._wait_readable, name="link-frames", daemon=True).start()

    def add(self, message: bytes) -> None:
        """Sends a frame after all earlier ones; dropped once broken."""
        if self._closed or self._broken is not None:
            return
        if len(self._unsent) >= self._bound:
            self._break(BatonError(ErrorKind.UNAVAILABLE, "the peer does not read its frames"))
            return
        self._busy_until = time.monotonic() + self._busy_s
        self._unsent.append(memoryview(_LENGTH.pack(len(message)) + message))
        self._flush()

    def take(self) -> bytes | None:
        """The next frame, or None. FrameError for one that is too long."""
        if self._closed:
            return None
        self._flush()
        message = self._next()
        if message is None and self._broken is None and self._read():
            message = self._next()
        if message is not None:
            self._busy_until = time.monotonic() + self._busy_s
        return message

    def failure(self) -> BatonError | None:
        """Says why no further frame will be received; None while the connection works."""
        return self._broken

    def busy_poll(self) -> bool:
        """True if the socket should be polled again within microseconds; if False, the next frame causes a
        wake-up."""
        if self._closed or self._broken is not None:
            return False
        if self._unsent or time.monotonic() < self._busy_until:
            return True
        self._watch.set()
        return False

    def close(self) -> None:
        """Closes the socket; unsent frames are lost. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer has closed it
        self._watch.set()

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError as error:
                self._connection_lost(error)
                return
            if sent < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][sent:]
            else:
                self._unsent.popleft()

    def _read(self) -> bool:
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return False
        except OSError as error:
            self._connection_lost(error)
            return False
        if not data:
            self._break(BatonError(ErrorKind.UNAVAILABLE, f"the {self._peer}'s frames ended"))
            return False
        self._received += data
        return True

    def _next(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MAX_FRAME_BYTES:
            self._received.clear()
            malformed = FrameError(f"a frame of {length} bytes")
            self._break(malformed)
            raise malformed
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        message = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message

    def _connection_lost(self, error: OSError) -> None:
        self._break(BatonError(ErrorKind.UNAVAILABLE, f"the {self._peer}'s frames: {error}"))

    def _break(self, error: BatonError) -> None:
        """Breaks the socket; the first reason is kept."""
        if self._broken is None:
            self._broken = error
        self._unsent.clear()

    def _wait_readable(self) -> None:
        """Runs until `close`, which also ends the wait."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            self._watch.wait()
            self._watch.clear()
            if self._closed:
                break
            poll.poll()
            self._wake()
        self._socket.close()
