"""Where senders bring the sockets of their links' frames: each says a secret that only its link's answer had.

expect(secret) ─▶ a sender connects, says it ─▶ the future has its socket
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from baton.addresses import join_address
from baton.errors import BatonError, ErrorKind
from kvtransfer.link.refusals import Refusals

SECRET_BYTES = 32
# Who has connected and not said all of it: so many, for so long each.
_MOST = 64
_SAYS_S = 2.0
_LOOK_S = 0.5


def bring(host: str, port: int, secret: bytes, timeout_s: float) -> socket.socket:
    """A sender's. OSError where nobody takes it."""
    sock = socket.create_connection((host, port), timeout_s)
    try:
        sock.sendall(secret)
    except OSError:
        sock.close()
        raise
    return sock


class FrameDoor:
    """One listener's. A thread of its own takes the callers, and calls `wake` when one has come."""

    def __init__(self, host: str, wake: Callable[[], None], port: int = 0) -> None:
        """`port` 0: any free one. `BatonError` INVALID where it cannot bind."""
        self._wake = wake
        self._refusals = Refusals("nccl")
        self._expected: dict[bytes, Future[socket.socket]] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._callers: dict[socket.socket, tuple[bytearray, float]] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host.strip("[]"), port), family=family)
        except OSError as error:
            raise BatonError(
                ErrorKind.INVALID, f"cannot listen on {join_address(host, port)} for frames: {error}"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="link-door", daemon=True)
        self._thread.start()

    def expect(self, secret: bytes) -> Future[socket.socket]:
        """From now on, until it has come or the future is cancelled."""
        brought: Future[socket.socket] = Future()
        with self._lock:
            self._expected = {key: other for key, other in self._expected.items() if not other.cancelled()}
            self._expected[secret] = brought
        return brought

    def close(self) -> None:
        """Ends the thread; who is still expected comes no more. Idempotent."""
        self._closing = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed before
        self._thread.join(2 * _LOOK_S)

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(_LOOK_S):
                if key.fileobj is self._socket:
                    self._accept()
                else:
                    self._hear(key.fileobj)  # type: ignore[arg-type]
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
            return  # the caller has gone, or the door closes
        caller.setblocking(False)
        if len(self._callers) >= _MOST:
            caller.close()
            return
        self._callers[caller] = bytearray(), time.monotonic() + _SAYS_S
        self._selector.register(caller, selectors.EVENT_READ)

    def _hear(self, caller: socket.socket) -> None:
        said, _ = self._callers[caller]
        try:
            data = caller.recv(SECRET_BYTES - len(said))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said += data
        if len(said) == SECRET_BYTES:
            self._let_in(caller, bytes(said))
        elif not data:
            self._drop(caller)

    def _let_in(self, caller: socket.socket, secret: bytes) -> None:
        with self._lock:
            brought = self._expected.pop(secret, None)
        if brought is None or not brought.set_running_or_notify_cancel():
            self._refusals.add("a socket for frames began with no link's secret")
            self._drop(caller)
            return
        self._selector.unregister(caller)
        del self._callers[caller]
        brought.set_result(caller)
        self._wake()

    def _drop(self, caller: socket.socket) -> None:
        self._selector.unregister(caller)
        del self._callers[caller]
        caller.close()
