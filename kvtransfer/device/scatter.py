"""The receiver's side of a link between devices: moves pieces out of the window into blocks, with checksums.

    begin, keep_in_staging, drop: a piece is announced ─▶ start: its bytes are there, a kernel ─▶ moved

Announcements come before bytes, so everything the host does for a piece, except the kernel's launch, is done
while the bytes travel; the launch too, where the device itself detects their arrival. Pieces are moved in
the order in which they were announced.

A corrupt piece has been written by the time it is detected, into blocks that its ticket reserved and no slot
has read (`kvtransfer.device.reference`). So only a piece whose place is expected is moved, and its pieces are
cancelled before their blocks are freed (`cancel`): a kernel that waits for bytes reads its table of rows
when it starts, and finds it empty.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, NamedTuple

from baton.device.streams.stream import Event
from kvtransfer.device.blocks import DeviceSink
from kvtransfer.device.mover import NOTHING, Prepared, host_sums
from kvtransfer.device.movers import scatterer
from kvtransfer.device.piece_memory import PieceMemory
from kvtransfer.protocol.checksum import place_sum
from kvtransfer.protocol.frames import Piece

# After a longer pause an H200's kernels start later: by 70 to 170 µs after ten milliseconds.
_WARM_S = 200e-6


class Outcome(Enum):
    """Result of moving an announced piece."""

    VALID = auto()
    CORRUPT = auto()
    IN_STAGING = auto()
    DROPPED = auto()


class MovedPiece(NamedTuple):
    """A piece that the device neither reads nor writes any more. `whole_blocks`: how many blocks it
    completed."""

    piece: Piece
    whole_blocks: int
    outcome: Outcome


@dataclass(slots=True)
class _Announced:
    """`rows`: of a piece that is to be moved. `outcome`: of one that is not, or no more. `arrival`: completes
    with the bytes of a piece whose kernel was launched ahead. `done`: completes with the kernel."""

    piece: Piece
    whole_blocks: int = 0
    rows: Prepared | None = None
    outcome: Outcome | None = None
    arrival: Event | None = None
    done: Event | None = None


class DeviceScatter:
    """Moves arrived pieces from staging into blocks on a device. Owned by the loop. Kernels that wait for
    bytes read this object's rows and window when they start: one that was broken off is kept alive until its
    release, whatever becomes of its receiver."""

    _broken_off: ClassVar[set[DeviceScatter]] = set()

    def __init__(self, sink: DeviceSink, window: PieceMemory) -> None:
        """RuntimeError where the device has no memory."""
        device = sink.blocks.device
        pieces, piece_bytes = sink.window_pieces, sink.piece_bytes
        self._sink = sink
        self._window = window
        self._heads = window.head > 0
        self._sums = host_sums(device, pieces, heads=self._heads)
        self._mover = scatterer(sink.blocks, pieces, piece_bytes, self._sums, window)
        self._stream = device.stream()
        unused = host_sums(device, 1, heads=self._heads)
        self._warmer = scatterer(sink.blocks, 1, piece_bytes, unused, window)
        self._warm_until = 0.0
        self._announced: deque[_Announced] = deque()
        self._started: deque[_Announced] = deque()
        self._count = 0

    @property
    def busy(self) -> bool:
        """True if pieces were announced that have not been reported as moved."""
        return bool(self._started or self._announced)

    def keep_warm(self) -> None:
        """Launches an empty kernel while bytes are awaited: an idle device takes a hundred microseconds and
        more to start the first one."""
        now = time.monotonic()
        if now < self._warm_until or self.busy or self._sink.steps_run():
            return
        self._warm_until = now + _WARM_S
        self._warmer.move(self._stream, NOTHING)

    def begin(self, piece: Piece, blocks: int, whole_blocks: int, arrival: Event | None = None) -> None:
        """Announces a piece that is to be moved into `blocks` blocks, whose places must be expected and used
        by no other piece. `arrival`: completes with its bytes, where the device has such an event."""
        transfer, group, ordinal = piece.transfer, piece.group, piece.ordinal
        places = [self._sink.place(transfer, group, ordinal + n) for n in range(blocks)]
        place = place_sum(transfer, group, ordinal, piece.offset, piece.length)
        rows = self._mover.prepare(piece, places, place)
        if self._heads:
            self._sums.clear_reported(piece.staging)
        announced = _Announced(piece, whole_blocks, rows, arrival=arrival)
        self._announced.append(announced)
        if arrival is not None:
            self._stream.wait_event(arrival)
            self._move(announced, rows)

    def _move(self, announced: _Announced, rows: Prepared) -> None:
        self._mover.move(self._stream, rows, beside_steps=self._sink.steps_run())
        announced.done = self._stream.record_event()

    def keep_in_staging(self, piece: Piece) -> None:
        """Leaves an announced piece where its bytes arrive."""
        self._announced.append(_Announced(piece, outcome=Outcome.IN_STAGING))

    def drop(self, piece: Piece) -> None:
        """Takes an announced piece without moving it."""
        self._announced.append(_Announced(piece, outcome=Outcome.DROPPED))

    def start(self, count: int) -> None:
        """Starts moving pieces, given that `count` of all pieces ever announced have arrived."""
        while self._announced and self._count < count:
            self._count += 1
            announced = self._announced.popleft()
            if announced.outcome is None and announced.rows is not None and announced.done is None:
                self._move(announced, announced.rows)
            self._started.append(announced)

    def moved(self, reported: Callable[[Piece], int]) -> list[MovedPiece]:
        """Pieces that the device is done with, in order, each once. `reported`: the checksum that the
        sender's device computed of a piece that has arrived, where it does not precede the piece itself."""
        moved: list[MovedPiece] = []
        while self._started and ((done := self._started[0].done) is None or done.query()):
            announced = self._started.popleft()
            piece, outcome = announced.piece, announced.outcome
            if outcome is None:
                expected = self._sums.reported(piece.staging) if self._heads else reported(piece)
                valid = self._sums.of(piece.staging) == expected
                outcome = Outcome.VALID if valid else Outcome.CORRUPT
            moved.append(MovedPiece(piece, announced.whole_blocks, outcome))
        return moved

    def cancel(self, transfer: int) -> None:
        """Cancels a transfer: no byte of it is written any more; blocks while one is being written."""
        for announced in (*self._announced, *self._started):
            if announced.piece.transfer == transfer and announced.outcome is None:
                announced.outcome = Outcome.DROPPED
                self._stop(announced)

    def _stop(self, announced: _Announced) -> None:
        """Keeps a piece from being moved. Blocks for a kernel that may be running, not for one that still
        waits for bytes."""
        if announced.done is None:
            return
        if announced.arrival is not None and announced.rows is not None:
            self._mover.clear(announced.rows)
            if not announced.arrival.query():  # queried after clearing: the kernel will find no rows
                return
        announced.done.synchronize()

    def break_off(self) -> list[Piece]:
        """Ends the moves of a link on which no more pieces will arrive: blocks until those that have arrived
        are moved. Returns the pieces that have not."""
        for announced in self._announced:
            self._stop(announced)
        for announced in self._started:
            if announced.done is not None:
                announced.done.synchronize()
        lost = [announced.piece for announced in self._announced]
        if any(announced.arrival is not None for announced in self._announced):
            self._broken_off.add(self)
        self._announced.clear()
        return lost

    def release(self) -> None:
        """Frees the window of a link that is fenced, so that no kernel waits for bytes any more."""
        self._stream.synchronize()
        self._broken_off.discard(self)
        self._window.free()
