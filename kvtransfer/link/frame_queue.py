"""Frames between the thread that carries them and the loop that works on them: bounded, in order.

A receiver's inbox also lands pieces: their bytes go into staging before their frame is queued, so a
piece that is heard is a piece that is there.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from baton.errors import BatonError
from kvtransfer.link.staging import Staging
from kvtransfer.protocol.frames import (
    Piece,
    ReceiverFrame,
    SenderFrame,
    decode_from_receiver,
    decode_from_sender,
)

T = TypeVar("T")

# Control frames an inbox holds besides a window of pieces; a peer that sends more has to wait.
CONTROL_FRAMES = 1024
# How often a full inbox looks whether it was closed meanwhile.
_FULL_POLL_S = 0.05


class Inbox(Generic[T]):
    """One thread puts, another takes. `close` names why no more will come."""

    def __init__(self, bound: int, wake: Callable[[], None]) -> None:
        self._frames: queue.Queue[T] = queue.Queue(bound)
        self._wake = wake
        self._closed: BatonError | None = None

    def put(self, frame: T) -> None:
        """Queues a frame; waits while the inbox is full, which holds the peer back. Dropped once closed."""
        while self._closed is None:
            try:
                self._frames.put(frame, timeout=_FULL_POLL_S)
            except queue.Full:
                continue
            self._wake()
            return

    def take(self) -> T | None:
        try:
            return self._frames.get_nowait()
        except queue.Empty:
            return None

    def close(self, error: BatonError) -> None:
        """The first reason stays."""
        if self._closed is None:
            self._closed = error
        self._wake()

    def closed(self) -> BatonError | None:
        return self._closed


class Landing(Protocol):
    """What a receiver's stream needs of whoever takes its messages."""

    def accept(self, message: bytes) -> None:
        """By the thread that carries them. Raises `FrameError`, after which nothing more comes."""

    def take(self) -> SenderFrame | None: ...

    def close(self, error: BatonError) -> None: ...

    def closed(self) -> BatonError | None: ...


class ReceiverInbox(Inbox[SenderFrame]):
    """Takes a sender's raw messages, lands pieces in staging."""

    def __init__(self, staging: Staging, wake: Callable[[], None]) -> None:
        super().__init__(staging.pieces + CONTROL_FRAMES, wake)
        self._staging = staging

    def accept(self, message: bytes) -> None:
        """Raises `FrameError` where the message is no frame, or a piece that may not land."""
        frame, payload = decode_from_sender(message)
        if isinstance(frame, Piece):
            self._staging.land(frame, payload)
        self.put(frame)


class SenderInbox(Inbox[ReceiverFrame]):
    """Takes a receiver's raw messages."""

    def __init__(self, window_pieces: int, wake: Callable[[], None]) -> None:
        super().__init__(window_pieces + CONTROL_FRAMES, wake)

    def accept(self, message: bytes) -> None:
        """Raises `FrameError` where the message is no frame."""
        self.put(decode_from_receiver(message))
