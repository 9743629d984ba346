"""The receiver's half of a link between devices: out of the window into blocks, summed on the way.

    begin, hold, drop: a piece is announced ─▶ land: its bytes are there, a kernel ─▶ ended: what became of it

Announcements come before bytes, so that all that the host has to do for a piece, but the kernel's launch, is
done while they travel; and that too where the device itself knows when they are there. Pieces land in the
order in which they were announced.

A piece that turns out wrong has been written by then, into blocks which its ticket reserved and no slot has
seen (`kvtransfer.device.reference`). So only a piece whose place is expected is moved, and whoever takes the
blocks away gives up its pieces first (`give_up`): a kernel that waits for bytes reads its rows when it
begins, and finds them empty.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, NamedTuple

from baton.device.stream import Event
from kvtransfer.device.blocks import DeviceSink
from kvtransfer.device.kernels.move_plan import Act
from kvtransfer.device.mover import NOTHING, Prepared, RowMover, sums_of
from kvtransfer.device.piece_memory import PieceMemory
from kvtransfer.protocol.checksum import place_sum
from kvtransfer.protocol.frames import Piece

# An H200's kernels begin as soon as ever after so long a pause; after ten milliseconds, 70 to 170 µs later.
_AWAKE_S = 200e-6


class Outcome(Enum):
    """What became of a piece that was announced."""

    RIGHT = auto()
    WRONG = auto()
    HELD = auto()  # it is where it landed
    DROPPED = auto()


class Ended(NamedTuple):
    """A piece that nobody writes or reads any more, but who has held it; so many blocks are whole with it."""

    piece: Piece
    whole_blocks: int
    outcome: Outcome


@dataclass(slots=True)
class _Announced:
    """`rows`: of a piece that is to be moved. `outcome`: of one that is not, or is no more. `there`: when a
    kernel that was launched ahead begins."""

    piece: Piece
    whole_blocks: int = 0
    rows: Prepared | None = None
    outcome: Outcome | None = None
    there: Event | None = None
    end: Event | None = None


class DeviceScatter:
    """Owned by the loop. Kernels that wait for bytes read rows and window of it when they begin: whoever has
    broken off lives until its release, whatever becomes of its receiver."""

    _broken_off: ClassVar[set[DeviceScatter]] = set()

    def __init__(self, sink: DeviceSink, window: PieceMemory) -> None:
        device = sink.blocks.device
        pieces, piece_bytes = sink.window_pieces, sink.piece_bytes
        self._sink = sink
        self._window = window
        self._heads = window.head > 0
        self._sums = sums_of(device, pieces, heads=self._heads)
        self._mover = RowMover(sink.blocks, pieces, piece_bytes, Act.SCATTER, sums=self._sums, staging=window)
        self._stream = device.stream()
        nowhere = sums_of(device, 1, heads=self._heads)
        self._nothing = RowMover(sink.blocks, 1, piece_bytes, Act.SCATTER, sums=nowhere, staging=window)
        self._awake_until = 0.0
        self._announced: deque[_Announced] = deque()
        self._landed: deque[_Announced] = deque()
        self._count = 0

    @property
    def under_way(self) -> bool:
        return bool(self._landed or self._announced)

    def keep_awake(self) -> None:
        """While bytes are awaited: a device that has had nothing to do for milliseconds takes a hundred
        microseconds and more to begin, when they are there."""
        now = time.monotonic()
        if now < self._awake_until or self.under_way or self._sink.steps_run():
            return
        self._awake_until = now + _AWAKE_S
        self._nothing.move(self._stream, NOTHING)

    def begin(self, piece: Piece, blocks: int, whole_blocks: int, there: Event | None = None) -> None:
        """Will be moved: into so many blocks, whose places are expected, and no other piece has them.
        `there`: when its bytes are, where the device knows."""
        transfer, group, ordinal = piece.transfer, piece.group, piece.ordinal
        places = [self._sink.place(transfer, group, ordinal + n) for n in range(blocks)]
        place = place_sum(transfer, group, ordinal, piece.offset, piece.length)
        rows = self._mover.prepare(piece, places, place)
        if self._heads:
            self._sums.forget_said(piece.staging)
        announced = _Announced(piece, whole_blocks, rows, there=there)
        self._announced.append(announced)
        if there is not None:
            self._stream.wait_event(there)
            self._move(announced, rows)

    def _move(self, announced: _Announced, rows: Prepared) -> None:
        self._mover.move(self._stream, rows, beside_steps=self._sink.steps_run())
        announced.end = self._stream.record_event()

    def hold(self, piece: Piece) -> None:
        """Stays where it lands, for somebody to look at."""
        self._announced.append(_Announced(piece, outcome=Outcome.HELD))

    def drop(self, piece: Piece) -> None:
        """Is nobody's."""
        self._announced.append(_Announced(piece, outcome=Outcome.DROPPED))

    def land(self, count: int) -> None:
        """So many of the pieces that were ever announced have their bytes here."""
        while self._announced and self._count < count:
            self._count += 1
            announced = self._announced.popleft()
            if announced.outcome is None and announced.rows is not None and announced.end is None:
                self._move(announced, announced.rows)
            self._landed.append(announced)

    def ended(self, said: Callable[[Piece], int]) -> list[Ended]:
        """What has ended since the last call, in its order. `said`: the checksum that its sender's device
        found in a piece that has landed, where it does not stand before the piece itself."""
        done: list[Ended] = []
        while self._landed and ((end := self._landed[0].end) is None or end.query()):
            announced = self._landed.popleft()
            piece, outcome = announced.piece, announced.outcome
            if outcome is None:
                told = self._sums.said(piece.staging) if self._heads else said(piece)
                right = self._sums.of(piece.staging) == told
                outcome = Outcome.RIGHT if right else Outcome.WRONG
            done.append(Ended(piece, announced.whole_blocks, outcome))
        return done

    def give_up(self, transfer: int) -> None:
        """No byte of this transfer is written any more; waits for what is being written at this moment."""
        for announced in (*self._announced, *self._landed):
            if announced.piece.transfer == transfer and announced.outcome is None:
                announced.outcome = Outcome.DROPPED
                self._stop(announced)

    def _stop(self, announced: _Announced) -> None:
        """It moves nothing from now on. Waits for a kernel that may run at this moment, and for none that
        waits for bytes."""
        if announced.end is None:
            return
        if announced.there is not None and announced.rows is not None:
            self._mover.empty(announced.rows)
            if not announced.there.query():  # asked afterwards: it will begin with no rows
                return
        announced.end.synchronize()

    def break_off(self) -> list[Piece]:
        """No more will land: waits until what has landed has been moved. The pieces that have not."""
        for announced in self._announced:
            self._stop(announced)
        for announced in self._landed:
            if announced.end is not None:
                announced.end.synchronize()
        lost = [announced.piece for announced in self._announced]
        if any(announced.there is not None for announced in self._announced):
            self._broken_off.add(self)
        self._announced.clear()
        return lost

    def release(self) -> None:
        """The link is fenced, so that no kernel waits for bytes any more: the window goes back to the
        device."""
        self._stream.synchronize()
        self._broken_off.discard(self)
        self._window.free()
