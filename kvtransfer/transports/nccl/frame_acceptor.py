"""Accepts the frame sockets of nccl links: each sender first sends a secret that only its link's answer
contained.

expect(secret) ─▶ a sender connects and sends it ─▶ the future has its socket
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from baton.base.addresses import accept_both_families, join_address, listening_family, listening_host
from baton.base.errors import BatonError, ErrorKind
from kvtransfer.link.open_requests import RejectedCallers

SECRET_BYTES = 32
# How many callers may be sending their secret at once, and for how long each.
MAX_CALLERS = 64
SECRET_TIMEOUT_S = 2.0
_POLL_S = 0.5


def connect_frames(host: str, port: int, secret: bytes, timeout_s: float) -> socket.socket:
    """A sender's frame socket, with the secret sent. OSError where it cannot connect."""
    sock = socket.create_connection((host, port), timeout_s)
    try:
        sock.sendall(secret)
    except OSError:
        sock.close()
        raise
    return sock


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError where it cannot be bound."""
    listening = socket.socket(listening_family(host), socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        accept_both_families(listening)
        listening.bind((host, port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


class FrameAcceptor:
    """The acceptor of one listener. Its thread accepts callers, and calls `wake` when one has sent its
    secret."""

    def __init__(
        self,
        host: str,
        wake: Callable[[], None],
        port: int = 0,
        max_callers: int = MAX_CALLERS,
        secret_timeout_s: float = SECRET_TIMEOUT_S,
    ) -> None:
        """`port` 0: any free one. BatonError(INVALID) where it cannot bind."""
        self._wake = wake
        self._max_callers = max_callers
        self._secret_timeout_s = secret_timeout_s
        self._rejected = RejectedCallers("nccl")
        self._expected: dict[bytes, Future[socket.socket]] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._callers: dict[socket.socket, tuple[bytearray, float]] = {}
        try:
            self._socket = _listening(listening_host(host), port)
        except OSError as error:
            raise BatonError(
                ErrorKind.INVALID, f"cannot listen on {join_address(host, port)} for frames: {error}"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="link-acceptor", daemon=True)
        self._thread.start()

    def expect(self, secret: bytes) -> Future[socket.socket]:
        """Accepts a socket with this secret, once, until the future is cancelled."""
        accepted: Future[socket.socket] = Future()
        with self._lock:
            self._expected = {key: other for key, other in self._expected.items() if not other.cancelled()}
            self._expected[secret] = accepted
        return accepted

    def close(self) -> None:
        """Ends the thread; no socket is accepted any more. Idempotent."""
        self._closing = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed before
        self._thread.join(2 * _POLL_S)

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(_POLL_S):
                if key.fileobj is self._socket:
                    self._accept()
                else:
                    self._read(key.fileobj)  # type: ignore[arg-type]
            now = time.monotonic()
            for caller in [one for one, (_, until) in self._callers.items() if now > until]:
                self._drop(caller)
        for caller in list(self._callers):
            self._drop(caller)
        self._selector.close()
        self._socket.close()

    def _accept(self) -> None:
        try:
            caller, _ = self._socket.accept()
        except OSError:
            return  # the caller has gone, or this acceptor closes
        caller.setblocking(False)
        if len(self._callers) >= self._max_callers:
            caller.close()
            return
        self._callers[caller] = bytearray(), time.monotonic() + self._secret_timeout_s
        self._selector.register(caller, selectors.EVENT_READ)

    def _read(self, caller: socket.socket) -> None:
        received, _ = self._callers[caller]
        try:
            data = caller.recv(SECRET_BYTES - len(received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        received += data
        if len(received) == SECRET_BYTES:
            self._match(caller, bytes(received))
        elif not data:
            self._drop(caller)

    def _match(self, caller: socket.socket, secret: bytes) -> None:
        with self._lock:
            accepted = self._expected.pop(secret, None)
        if accepted is None or not accepted.set_running_or_notify_cancel():
            self._rejected.add("a frame socket started with an unknown secret")
            self._drop(caller)
            return
        self._selector.unregister(caller)
        del self._callers[caller]
        accepted.set_result(caller)
        self._wake()

    def _drop(self, caller: socket.socket) -> None:
        self._selector.unregister(caller)
        del self._callers[caller]
        caller.close()
