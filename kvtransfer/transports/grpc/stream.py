"""What both ends of the grpc transport share: the method, its metadata, channel options, the outbox."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from baton.errors import BatonError, ErrorKind
from kvtransfer.protocol.frames import HEADER_BYTES, MAX_COMMIT_BYTES

SERVICE = "baton.v1.TransferService"
# The raw method that carries frames; not in the proto, since its messages are no protobuf.
STREAM = "Frames"
STREAM_METHOD = f"/{SERVICE}/{STREAM}"
# Binds a stream to the link that OpenLink named, as decimal digits.
LINK_ID_KEY = "baton-link-id"
# On a refused OpenLink: the name of the ErrorKind, which says more than a status code.
ERROR_KIND_KEY = "baton-error-kind"
# Beside it, where the request was not judged and another transport is worth a try (`OutOfReachError`).
OTHER_WAY_KEY = "baton-other-way"

TRANSPORT = "grpc"

# A process that is frozen or cut off is noticed within the two together, whatever its engine may be allowed
# to take for an answer: pings are answered by grpc's own threads, however busy the loop is.
PING_EVERY_S = 1.0
PING_ANSWER_S = 1.25
# For the same reason so long at most until a connection speaks HTTP/2.
CONNECT_S = 2.0


def channel_options(piece_bytes: int, peer_timeout_s: float) -> list[tuple[str, int]]:
    """For server and client alike: large messages, and pings that notice a dead peer within the time-out."""
    ping_ms, answer_ms = (
        max(500, int(min(bound, peer_timeout_s / 2) * 1000)) for bound in (PING_EVERY_S, PING_ANSWER_S)
    )
    largest = max(piece_bytes, MAX_COMMIT_BYTES) + HEADER_BYTES
    return [
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", largest),
        ("grpc.so_reuseport", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        # The one that counts for a frozen peer: without it a lost ping takes a minute to be noticed.
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),  # however often a peer pings
    ]


class Outbox:
    """Messages that wait for grpc to take them; the loop adds, grpc's thread iterates.

    Bounded by count: pieces by the link's credits, all else by what one peer may ask for. A peer that
    makes us queue more without reading any has its outbox closed.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._messages: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._closed: BatonError | None = None

    def add(self, message: bytes) -> None:
        """Dropped once closed."""
        with self._changed:
            if self._closed is not None:
                return
            if len(self._messages) >= self._bound:
                self._closed = BatonError(ErrorKind.UNAVAILABLE, "the peer does not read its frames")
            else:
                self._messages.append(message)
            self._changed.notify()

    def close(self, error: BatonError) -> None:
        """Ends the iteration; the first reason stays, messages that wait are lost."""
        with self._changed:
            if self._closed is None:
                self._closed = error
            self._messages.clear()
            self._changed.notify_all()

    @property
    def closed(self) -> BatonError | None:
        return self._closed

    def __iter__(self) -> Iterator[bytes]:
        while (message := self._next()) is not None:
            yield message

    def _next(self) -> bytes | None:
        with self._changed:
            # Ends with close(), which the end of the call triggers: the call's keepalive is the deadline.
            self._changed.wait_for(lambda: self._messages or self._closed is not None)
            if self._closed is not None:
                return None
            return self._messages.popleft()
