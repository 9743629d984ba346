"""Code that both ends of the grpc transport share: method and metadata names, channel options, the send
queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from baton.base.errors import BatonError, ErrorKind
from baton.rpc.connection_options import EXCLUSIVE_PORT, PING_INTERVAL_S, PING_TIMEOUT_S, member_options
from kvtransfer.protocol.frames import HEADER_BYTES, MAX_COMMIT_BYTES

SERVICE = "baton.v1.TransferService"
# The raw method that carries frames; not in the proto, since its messages are not protobuf.
STREAM = "Frames"
STREAM_METHOD = f"/{SERVICE}/{STREAM}"
# Names the link that a stream belongs to, in decimal digits.
LINK_ID_KEY = "baton-link-id"
# On a refused request that was not judged: another transport should be tried (`UnreachableError`).
UNREACHABLE_KEY = "baton-unreachable"

# The limit for a connection to be established: gRPC's own threads do that, however busy the engine's loop is.
CONNECT_TIMEOUT_S = 2.0
# No ping is more frequent, nor waited for less, however soon a peer is to be noticed.
_LEAST_S = 0.5


def channel_options(piece_bytes: int, peer_timeout_s: float) -> list[tuple[str, int]]:
    """Options of server and client: large messages, and pings that notice a dead peer within the time-out."""
    interval_s, timeout_s = (
        max(_LEAST_S, min(bound, peer_timeout_s / 2)) for bound in (PING_INTERVAL_S, PING_TIMEOUT_S)
    )
    return [
        *member_options(max(piece_bytes, MAX_COMMIT_BYTES) + HEADER_BYTES, interval_s, timeout_s),
        EXCLUSIVE_PORT,
        ("grpc.http2.max_ping_strikes", 0),  # peers may ping at any rate
    ]


class SendQueue:
    """Messages that wait for gRPC to take them; the loop adds, gRPC's thread iterates.

    Bounded by count: pieces are bounded by the link's credits, all else by what one peer may ask for. When a
    peer causes messages without reading any, its queue is closed.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._messages: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._closed: BatonError | None = None

    def add(self, message: bytes) -> None:
        """Queues a message; dropped once closed."""
        with self._changed:
            if self._closed is not None:
                return
            if len(self._messages) >= self._bound:
                self._closed = BatonError(ErrorKind.UNAVAILABLE, "the peer does not read its frames")
            else:
                self._messages.append(message)
            self._changed.notify()

    def close(self, error: BatonError) -> None:
        """Ends the iteration and drops what waits; the first reason is kept."""
        with self._changed:
            if self._closed is None:
                self._closed = error
            self._messages.clear()
            self._changed.notify_all()

    @property
    def closed(self) -> BatonError | None:
        """The reason why it was closed; None while open."""
        return self._closed

    def __iter__(self) -> Iterator[bytes]:
        while (message := self._next()) is not None:
            yield message

    def _next(self) -> bytes | None:
        with self._changed:
            # No deadline: the end of the call closes the queue, and keepalive bounds the call.
            self._changed.wait_for(lambda: self._messages or self._closed is not None)
            if self._closed is not None:
                return None
            return self._messages.popleft()
