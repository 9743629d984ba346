"""Sequences that are swapped out to host memory, and swapped in again.

    stall its slot ──▶ applied by the steps ──▶ its blocks are copied out ──▶ freed; it waits
                                                                              │ blocks are free again
    extend its block table ◀── copied in ◀────────────────────────────────────┘

The slot remains the sequence's throughout, stalled in every step, so only its blocks are copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from baton.device.streams.stream import Event
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.blocks import BlockTables, OutOfBlocksError
from baton.engine.memory.host_blocks import HostBlocks, Saved
from services.worker.engine.decode.reservation import Reservation, SlotKey


class _Stage(Enum):
    STALLING = auto()
    SAVING = auto()
    WAITING = auto()
    LOADING = auto()


@dataclass(slots=True)
class _Swapped:
    reservation: Reservation
    capacity: int  # tokens that its blocks have room for when it returns
    entry: int  # the mailbox entry that stalls its slot
    stage: _Stage = _Stage.STALLING
    saved: Saved | None = None
    copy: Event | None = None


class SwappedSequences:
    """The sequences of one engine that are swapped out; first out, first in. All calls come from its loop."""

    def __init__(self, pools: BlockPools, loop: DecodeLoop, host: HostBlocks) -> None:
        self._pools = pools
        self._loop = loop
        self._host = host
        self._swapped: dict[SlotKey, _Swapped] = {}

    def __contains__(self, key: SlotKey) -> bool:
        return key in self._swapped

    def __len__(self) -> int:
        return len(self._swapped)

    def fits(self, reservation: Reservation) -> bool:
        """True if host memory has room for the reservation's blocks now."""
        unsaved = [one.reservation.blocks for one in self._swapped.values() if one.saved is None]
        unsaved.append(reservation.blocks)
        return self._host.fits(tuple(sum(group, ()) for group in zip(*unsaved, strict=True)))

    def swap_out(self, reservation: Reservation, capacity: int) -> None:
        """Begins to swap a sequence out. It returns with blocks for `capacity` tokens."""
        entry = self._loop.stall(*reservation.key)
        self._swapped[reservation.key] = _Swapped(reservation, capacity, entry)

    def blocks_being_freed(self) -> list[BlockTables]:
        """Blocks that will be free soon, except those of sequences that are ending."""
        soon = [one for one in self._swapped.values() if one.stage in (_Stage.STALLING, _Stage.SAVING)]
        return [one.reservation.blocks for one in soon if not one.reservation.ending]

    def remove(self, key: SlotKey) -> None:
        """Removes a sequence whose slot has ended; the blocks that it has are its owner's to free."""
        one = self._swapped.pop(key)
        if one.copy is not None:
            one.copy.synchronize()
        if one.saved is not None:
            self._host.release(one.saved)

    def step(self, *, may_return: bool) -> list[SlotKey]:
        """Advances each sequence as far as possible; returns those that run again. `may_return`: whether no
        running sequence waits for blocks."""
        returned: list[SlotKey] = []
        for key, one in list(self._swapped.items()):
            if one.reservation.ending:
                continue  # until its output was read
            if one.stage is _Stage.STALLING and self._loop.applied(one.entry):
                one.saved, one.copy = self._host.save(one.reservation.blocks)
                one.stage = _Stage.SAVING
            if one.stage is _Stage.SAVING and _ended(one.copy):
                self._pools.release(one.reservation.take_blocks())
                one.stage = _Stage.WAITING
            if one.stage is _Stage.WAITING and may_return:
                may_return = self._load(one)
            if one.stage is _Stage.LOADING and _ended(one.copy):
                self._restore(one)
                returned.append(key)
        return returned

    def _load(self, one: _Swapped) -> bool:
        """Begins to copy a sequence in; False where it lacks blocks, so that none overtakes it."""
        assert one.saved is not None
        try:
            blocks = self._pools.allocate(one.capacity)
        except OutOfBlocksError:
            return False
        one.reservation.append_blocks(blocks, one.capacity)
        one.copy = self._host.load(one.saved, blocks)
        one.stage = _Stage.LOADING
        return True

    def _restore(self, one: _Swapped) -> None:
        assert one.saved is not None
        self._host.release(one.saved)
        key, blocks = one.reservation.key, one.reservation.blocks
        del self._swapped[key]
        self._loop.extend(*key, blocks, tuple(0 for _ in blocks), one.capacity)


def _ended(copy: Event | None) -> bool:
    return copy is not None and copy.query()
