"""A link's staging memory at its receiver: a fixed window of pieces, each owned by one side at a time.

    SENDER ──store──▶ RECEIVER ──free──▶ SENDER            (all indices start with the sender)
       └──── quarantine ────▶ QUARANTINED ──release──▶ (the window is freed)

The sender owns an index, and may write it at any time, until its piece is announced (`store`, `take`); then
the receiver owns it until the piece is verified and scattered, or dropped. So no index is granted while it
could still be written. What a broken link's sender owned is quarantined, and freed in one way only:
the link is fenced, and the whole window goes (`release`).

`store` is called by the thread that reads messages, everything else by the loop; a lock keeps the counts
consistent. Where senders write the window themselves, `take` is called in place of `store`.
"""

from __future__ import annotations

import threading
from collections import Counter
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.protocol.frames import FrameError, Piece
from kvtransfer.protocol.piece_geometry import max_pieces_per_transfer


class Owner(IntEnum):
    SENDER = 0
    RECEIVER = 1
    QUARANTINED = 2


class WindowMemory(Protocol):
    """Memory of a window: an array of bytes, or a device's."""

    @property
    def size(self) -> int: ...

    def __getitem__(self, part: slice, /) -> NDArray[np.uint8]:
        """Returns the bytes of a slice, or a copy of them."""


class Staging:
    """`pieces` indices of `piece_bytes` bytes each: in `window`, which senders write; or, without one, each
    as its message contained it, which is kept until its index is freed."""

    def __init__(
        self,
        pieces: int,
        piece_bytes: int,
        window: WindowMemory | None = None,
        *,
        between_devices: bool = False,
    ) -> None:
        if pieces < 2:
            raise ValueError("a window of staging has at least two pieces")
        self.pieces = pieces
        self.piece_bytes = piece_bytes
        self.max_per_transfer = max_pieces_per_transfer(pieces, between_devices=between_devices)
        if window is not None and window.size != pieces * piece_bytes:
            raise ValueError(f"a window of {window.size} bytes for {pieces} pieces of {piece_bytes}")
        self._window = window
        self._payloads: list[memoryview | None] = [None] * pieces
        self._owners = bytearray([Owner.SENDER] * pieces)
        self._transfers = [0] * pieces
        self._pieces_of: Counter[int] = Counter()
        self._lock = threading.Lock()

    def store(self, piece: Piece, payload: memoryview) -> None:
        """Keeps the payload of a piece, which must not change any more; its index becomes the receiver's.
        FrameError where the index is not the sender's, the piece is too long, or its transfer has too
        many."""
        with self._lock:
            self._take(piece)
            self._payloads[piece.staging] = payload

    def take(self, piece: Piece) -> None:
        """Takes the index of a piece that the sender has written, or is about to; it becomes the receiver's.
        FrameError as in `store`."""
        with self._lock:
            self._take(piece)

    def _take(self, piece: Piece) -> None:
        if piece.staging >= self.pieces or self._owners[piece.staging] != Owner.SENDER:
            raise FrameError(f"staging index {piece.staging} is not the sender's")
        if piece.length > self.piece_bytes:
            raise FrameError(f"{piece.length} bytes do not fit a piece of {self.piece_bytes}")
        if self._pieces_of[piece.transfer] >= self.max_per_transfer:
            raise FrameError(
                f"one transfer occupies more than {self.max_per_transfer} of {self.pieces} staging pieces"
            )
        self._pieces_of[piece.transfer] += 1
        self._transfers[piece.staging] = piece.transfer
        self._owners[piece.staging] = Owner.RECEIVER

    def view(self, index: int, length: int) -> memoryview:
        """The first `length` bytes of an index that the receiver owns; read-only."""
        if self._window is None:
            payload = self._payloads[index]
            assert payload is not None, "the receiver owns an index only once its payload is stored"
            return payload[:length].toreadonly()
        start = index * self.piece_bytes
        return self._window[start : start + length].data.toreadonly()

    def free(self, index: int) -> None:
        """Returns an index to the sender, which may write it again once it has the credit."""
        with self._lock:
            if self._owners[index] != Owner.RECEIVER:
                raise AssertionError(f"staging index {index} freed twice")
            self._owners[index] = Owner.SENDER
            self._payloads[index] = None
            transfer = self._transfers[index]
            self._pieces_of[transfer] -= 1
            if not self._pieces_of[transfer]:
                del self._pieces_of[transfer]

    def quarantine(self) -> None:
        """Quarantines what the sender of a broken link may still write: it is not granted again."""
        with self._lock:
            for index, owner in enumerate(self._owners):
                if owner == Owner.SENDER:
                    self._owners[index] = Owner.QUARANTINED

    def release(self) -> None:
        """Frees the window of a link that is fenced: it cannot be written any more."""
        with self._lock:
            self._window = None
            self._payloads = [None] * self.pieces
            self._owners = bytearray([Owner.QUARANTINED] * self.pieces)

    def count(self, owner: Owner) -> int:
        """Number of indices that this side owns."""
        with self._lock:
            return self._owners.count(owner)
