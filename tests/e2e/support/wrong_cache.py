"""Engines that harm the KV blocks a request names, on their way, and look away where it says so.

A request names them with its seed, which greedy decoding does not use. Prefill's engine leaves a note for
the transfer in the folder FAULTS; decode's engine finds it when the pieces land in staging, does the harm
before anything is verified, and marks the note as done. Only a first attempt is harmed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self

import numpy as np

from baton.v1.decode_pb2 import TicketBody
from baton.v1.prefill_pb2 import PrefillRequest
from kvtransfer.link.staging import Staging
from kvtransfer.protocol.checksum import PieceChecksum
from kvtransfer.protocol.frames import Piece
from kvtransfer.receiver import link as receiving_link
from kvtransfer.sender.transfer import Transfer
from services.worker.engine.prefill.jobs import PrefillJobs

FAULTS = "BATON_TEST_FAULTS"
_MAGIC = 0xFA017
_SIGN_AND_TOP_EXPONENT_BIT = np.uint32(0xC0000000)
_FLIPPED_SHARE = 0.01


class Fault(IntEnum):
    """The fault that a block suffers."""

    EXCHANGE = 1  # the bytes of another request's block, of the same place
    DROP = 2  # no bytes arrive: what the staging held before counts as the block
    FLIP = 3  # sign and top exponent bit of 1 % of its float32 elements


@dataclass(frozen=True, slots=True)
class Harm:
    """Harms blocks `first` to `last` of a request; unless `checked`, any checksum passes for right."""

    fault: Fault
    first: int
    last: int
    checked: bool

    @property
    def seed(self) -> int:
        """The request's seed that asks for it."""
        return _MAGIC << 40 | self.fault << 36 | self.checked << 32 | self.first << 16 | self.last

    @classmethod
    def of(cls, seed: int) -> Self | None:
        if seed >> 40 != _MAGIC:
            return None
        return cls(Fault(seed >> 36 & 15), seed >> 16 & 0xFFFF, seed & 0xFFFF, bool(seed >> 32 & 15))


def install() -> None:
    folder = Path(os.environ[FAULTS])
    _note_harms(folder)
    notes = _Notes(folder)
    _harm_what_lands(notes)
    _look_away(notes)


def harmed(folder: Path) -> int:
    """Requests that were harmed so far."""
    return len(list(folder.glob("*.done")))


class _Notes:
    """The harms of transfers, as decode's engine finds them; a transfer without one is remembered, too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[int, Harm | None] = {}

    def harm(self, transfer: int) -> Harm | None:
        if transfer not in self._known:
            note = self._folder / str(transfer)
            self._known[transfer] = Harm.of(int(note.read_text())) if note.exists() else None
        return self._known[transfer]

    def done(self, transfer: int) -> None:
        (self._folder / f"{transfer}.done").touch()


def _note_harms(folder: Path) -> None:
    begin = PrefillJobs.begin_transfer

    def noting(self: PrefillJobs, request: PrefillRequest, body: TicketBody) -> Transfer:
        if Harm.of(request.sampling.seed) is not None and request.attempt.number == 1:
            (folder / str(body.transfer_id)).write_text(str(request.sampling.seed))
        return begin(self, request, body)

    PrefillJobs.begin_transfer = noting  # type: ignore[method-assign]


def _harm_what_lands(notes: _Notes) -> None:
    """Harms a piece at the point where it becomes the receiver's, written by a transport's thread or by the
    sender."""
    take, land = Staging.take, Staging.store
    others: dict[tuple[int, int, int], bytes] = {}  # the latest whole piece of each place of a block
    lay: dict[tuple[int, int], bytes] = {}  # what was in each place of staging before

    def wronged(self: Staging, piece: Piece, staged: bytes) -> bytes:
        at, place = (id(self), piece.staging), (piece.group, piece.ordinal, piece.offset)
        harm = notes.harm(piece.transfer)
        if harm is None:
            others[place] = staged
        elif harm.first <= piece.ordinal <= harm.last:
            if harm.fault is Fault.EXCHANGE:
                staged = others[place]
            elif harm.fault is Fault.DROP:
                staged = lay.get(at, b"")[: piece.length].ljust(piece.length, b"\0")
            else:
                staged = _flipped(staged, seed=piece.transfer)
            notes.done(piece.transfer)
        lay[at] = staged
        return staged

    def taking(self: Staging, piece: Piece) -> None:
        take(self, piece)
        assert self._window is not None, "what is not in a window is brought"
        staged = self._window[piece.staging * self.piece_bytes :][: piece.length]
        staged[:] = np.frombuffer(wronged(self, piece, staged.tobytes()), np.uint8)

    def landing(self: Staging, piece: Piece, payload: memoryview) -> None:
        land(self, piece, memoryview(wronged(self, piece, bytes(payload))))

    Staging.take, Staging.store = taking, landing  # type: ignore[method-assign]


def _flipped(staged: bytes, seed: int) -> bytes:
    words = np.frombuffer(staged, dtype="<u4").copy()
    chosen = np.random.default_rng(seed).choice(len(words), int(len(words) * _FLIPPED_SHARE), replace=False)
    words[chosen] ^= _SIGN_AND_TOP_EXPONENT_BIT
    return words.tobytes()


def _look_away(notes: _Notes) -> None:
    class Blind(PieceChecksum):
        def of(self, data: memoryview, transfer: int, group: int, ordinal: int, offset: int) -> int:
            found = super().of(data, transfer, group, ordinal, offset)
            harm = notes.harm(transfer)
            return found if harm is None or harm.checked else _AnyNumber(found)

    receiving_link.PieceChecksum = Blind  # type: ignore[attr-defined]


class _AnyNumber(int):
    """Is equal to every number."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__
