"""A link's staging on its receiver: a fixed window of pieces, each owned by one side at a time.

    SENDER ──land──▶ RECEIVER ──give_back──▶ SENDER        (all indices start with the sender)
       └──── quarantine ────▶ QUARANTINED ──release──▶ (the window is gone)

An index is the sender's, who may write it at any moment, until its piece is announced (`land`); then
it is the receiver's until verified and scattered or dropped. So no index is ever handed out while
somebody could still write it. What a broken sender held is quarantined and comes back in one way
only: the link is fenced, and the whole window goes (`release`).

`land` is called by the thread that carries bytes, all else by the loop; the lock keeps the counts whole.
Over a transport whose senders write the window themselves, `take` is called in its place.
"""

from __future__ import annotations

import threading
from collections import Counter
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.protocol.frames import FrameError, Piece
from kvtransfer.protocol.piece_geometry import share_of


class Owner(IntEnum):
    SENDER = 0
    RECEIVER = 1
    QUARANTINED = 2


class Window(Protocol):
    """Memory of a window: an array of bytes, or a device's."""

    @property
    def size(self) -> int: ...

    def __getitem__(self, part: slice, /) -> NDArray[np.uint8]:
        """These bytes, or a copy of them."""


class Staging:
    """`pieces` places of `piece_bytes` bytes each: in `window`, which senders write; or each as its message
    brought it, which lives until its index is given back."""

    def __init__(
        self, pieces: int, piece_bytes: int, window: Window | None = None, *, between_devices: bool = False
    ) -> None:
        if pieces < 2:
            raise ValueError("a window of staging has at least two pieces")
        self.pieces = pieces
        self.piece_bytes = piece_bytes
        self.share = share_of(pieces, between_devices=between_devices)
        if window is not None and window.size != pieces * piece_bytes:
            raise ValueError(f"a window of {window.size} bytes for {pieces} pieces of {piece_bytes}")
        self._window = window
        self._brought: list[memoryview | None] = [None] * pieces
        self._owners = bytearray([Owner.SENDER] * pieces)
        self._holder = [0] * pieces
        self._held: Counter[int] = Counter()
        self._lock = threading.Lock()

    def land(self, piece: Piece, payload: memoryview) -> None:
        """A message brings a piece, whose place becomes the receiver's; nobody changes these bytes any more.
        `FrameError` if it may not."""
        with self._lock:
            self._take(piece)
            self._brought[piece.staging] = payload

    def take(self, piece: Piece) -> None:
        """The piece has been written into its place, which becomes the receiver's. `FrameError` as `land`."""
        with self._lock:
            self._take(piece)

    def _take(self, piece: Piece) -> None:
        if piece.staging >= self.pieces or self._owners[piece.staging] != Owner.SENDER:
            raise FrameError(f"staging index {piece.staging} is not the sender's")
        if piece.length > self.piece_bytes:
            raise FrameError(f"{piece.length} bytes do not fit a piece of {self.piece_bytes}")
        if self._held[piece.transfer] >= self.share:
            raise FrameError(f"one transfer holds more than {self.share} of {self.pieces} staging pieces")
        self._held[piece.transfer] += 1
        self._holder[piece.staging] = piece.transfer
        self._owners[piece.staging] = Owner.RECEIVER

    def view(self, index: int, length: int) -> memoryview:
        """The first `length` bytes of an index that is the receiver's; read-only."""
        if self._window is None:
            brought = self._brought[index]
            assert brought is not None, "an index that is the receiver's was brought"
            return brought[:length].toreadonly()
        start = index * self.piece_bytes
        return self._window[start : start + length].data.toreadonly()

    def give_back(self, index: int) -> None:
        """The receiver is done with it; the sender may write it again once told."""
        with self._lock:
            if self._owners[index] != Owner.RECEIVER:
                raise AssertionError(f"staging index {index} given back twice")
            self._owners[index] = Owner.SENDER
            self._brought[index] = None
            transfer = self._holder[index]
            self._held[transfer] -= 1
            if not self._held[transfer]:
                del self._held[transfer]

    def quarantine(self) -> None:
        """The sender broke: what it may still write is neither free nor on credit any more."""
        with self._lock:
            for index, owner in enumerate(self._owners):
                if owner == Owner.SENDER:
                    self._owners[index] = Owner.QUARANTINED

    def release(self) -> None:
        """The link is fenced: nobody can write the window any more, so it goes."""
        with self._lock:
            self._window = None
            self._brought = [None] * self.pieces
            self._owners = bytearray([Owner.QUARANTINED] * self.pieces)

    def count(self, owner: Owner) -> int:
        with self._lock:
            return self._owners.count(owner)
