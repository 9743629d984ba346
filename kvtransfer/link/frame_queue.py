"""A bounded queue of frames, from the thread that reads a link's messages to the loop that handles them.

A receiver's queue also stores pieces: their bytes are in staging before their frame is queued, so the bytes
of a piece that was received are there.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.base.errors import BatonError
from kvtransfer.link.staging import Staging
from kvtransfer.protocol.frames import (
    Piece,
    ReceiverFrame,
    SenderFrame,
    decode_from_receiver,
    decode_from_sender,
)

T = TypeVar("T")

# Control frames a queue holds besides a window of pieces; a peer that sends more has to wait.
CONTROL_FRAMES = 1024
# How often `put` on a full queue checks whether the queue was closed.
_FULL_POLL_S = 0.05


class FrameQueue(Generic[T]):
    """Bounded queue of frames between two threads: one calls `accept` and `close`, the other `take`."""

    def __init__(self, bound: int, decode: Callable[[bytes], T], wake: Callable[[], None]) -> None:
        """`decode` raises FrameError for a message that is not a valid frame. `wake` is called when
        something was queued, and on close."""
        self._frames: queue.Queue[T] = queue.Queue(bound)
        self._decode = decode
        self._wake = wake
        self._closed: BatonError | None = None

    def accept(self, message: bytes) -> None:
        """Decodes a message and queues its frame; blocks while the queue is full, which holds the peer back.
        Dropped once closed. FrameError: the link is to be broken."""
        frame = self._decode(message)
        while self._closed is None:
            try:
                self._frames.put(frame, timeout=_FULL_POLL_S)
            except queue.Full:
                continue
            self._wake()
            return

    def take(self) -> T | None:
        """The next frame, or None."""
        try:
            return self._frames.get_nowait()
        except queue.Empty:
            return None

    def close(self, error: BatonError) -> None:
        """Ends the queue: no frame follows, for this reason; the first reason is kept."""
        if self._closed is None:
            self._closed = error
        self._wake()

    def closed(self) -> BatonError | None:
        """Says why no frame follows; None while open."""
        return self._closed


def receiver_queue(staging: Staging, wake: Callable[[], None]) -> FrameQueue[SenderFrame]:
    """A receiver's queue, which stores the payload of pieces in `staging`."""

    def decode(message: bytes) -> SenderFrame:
        frame, payload = decode_from_sender(message)
        if isinstance(frame, Piece):
            staging.store(frame, payload)
        return frame

    return FrameQueue(staging.pieces + CONTROL_FRAMES, decode, wake)


def sender_queue(window_pieces: int, wake: Callable[[], None]) -> FrameQueue[ReceiverFrame]:
    """Creates the queue of frames that a sender receives."""
    return FrameQueue(window_pieces + CONTROL_FRAMES, decode_from_receiver, wake)
