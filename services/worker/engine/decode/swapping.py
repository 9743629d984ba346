"""Running sequences that are set aside in the host's memory, and come back.

    hold ──▶ the steps have heard ──▶ its blocks are copied out ──▶ freed, it waits
                                                                      │ blocks for it are free again
    grow ◀── copied in ◀──────────────────────────────────────────────┘

The slot stays the sequence's own all the while, held by every step, so nothing but its blocks is moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from baton.engine.decode.loop import DecodeLoop
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.blocks import BlockTables, OutOfBlocksError
from baton.engine.memory.host_blocks import Copy, HostBlocks, Saved
from baton.engine.step_shape import MAX_TOKENS_A_STEP
from services.worker.engine.decode.reservation import Key, Reservation


class _Stage(Enum):
    HOLDING = auto()
    SAVING = auto()
    WAITING = auto()
    LOADING = auto()


@dataclass(slots=True)
class _Pause:
    reservation: Reservation
    wanted: int  # tokens that its blocks hold when it comes back
    number: int  # of the entry that holds it
    position: int  # of its last token, at the furthest, after `steps` steps
    steps: int
    stage: _Stage = _Stage.HOLDING
    saved: Saved | None = None
    copy: Copy | None = None


class Pauses:
    """Of one engine; all calls from its loop. First paused, first back."""

    def __init__(self, pools: BlockPools, loop: DecodeLoop, host: HostBlocks) -> None:
        self._pools = pools
        self._loop = loop
        self._host = host
        self._pauses: dict[Key, _Pause] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._pauses

    def __len__(self) -> int:
        return len(self._pauses)

    def fits(self, reservation: Reservation) -> bool:
        """Whether its blocks could be set aside now."""
        kept = [pause.reservation.blocks for pause in self._pauses.values() if pause.saved is None]
        kept.append(reservation.blocks)
        return self._host.fits(tuple(sum(group, ()) for group in zip(*kept, strict=True)))

    def begin(self, reservation: Reservation, position: int, wanted: int) -> None:
        """Sets it aside; it comes back with blocks for `wanted` tokens. `position`: of its last token, at the
        furthest."""
        number = self._loop.hold(*reservation.key)
        self._pauses[reservation.key] = _Pause(reservation, wanted, number, position, self._loop.ring.steps)

    def coming(self) -> list[BlockTables]:
        """Blocks that will be free soon, those of slots that are leaving aside."""
        soon = [pause for pause in self._pauses.values() if pause.stage in (_Stage.HOLDING, _Stage.SAVING)]
        return [pause.reservation.blocks for pause in soon if not pause.reservation.leaving]

    def end(self, key: Key) -> None:
        """The slot has ended meanwhile; its blocks, whatever it has of them, are its owner's to free."""
        pause = self._pauses.pop(key)
        if pause.copy is not None:
            pause.copy.wait()
        if pause.saved is not None:
            self._host.release(pause.saved)

    def step(self, *, may_return: bool) -> list[tuple[Key, int]]:
        """Moves each on as far as it goes; those that are back, and their positions, at the furthest.

        `may_return`: nobody else waits for blocks.
        """
        back: list[tuple[Key, int]] = []
        for key, pause in list(self._pauses.items()):
            if pause.reservation.leaving:
                continue  # until its last word is read
            if pause.stage is _Stage.HOLDING and self._loop.applied(pause.number):
                steps = self._loop.ring.steps - pause.steps
                furthest = pause.position + steps * MAX_TOKENS_A_STEP
                pause.position = min(furthest, pause.reservation.grant.capacity)
                pause.saved, pause.copy = self._host.save(pause.reservation.blocks)
                pause.stage = _Stage.SAVING
            if pause.stage is _Stage.SAVING and _ended(pause.copy):
                self._pools.release(pause.reservation.give_up_blocks())
                pause.stage = _Stage.WAITING
            if pause.stage is _Stage.WAITING and may_return:
                may_return = self._return(pause)
            if pause.stage is _Stage.LOADING and _ended(pause.copy):
                self._restore(pause)
                back.append((key, pause.position))
        return back

    def _return(self, pause: _Pause) -> bool:
        """Begins to copy it in; False where there are no blocks for it, so that none overtakes it."""
        assert pause.saved is not None
        try:
            blocks = self._pools.allocate(pause.wanted)
        except OutOfBlocksError:
            return False
        pause.reservation.grow(blocks, pause.wanted)
        pause.copy = self._host.load(pause.saved, blocks)
        pause.stage = _Stage.LOADING
        return True

    def _restore(self, pause: _Pause) -> None:
        assert pause.saved is not None
        self._host.release(pause.saved)
        key, blocks = pause.reservation.key, pause.reservation.blocks
        del self._pauses[key]
        self._loop.grow(*key, blocks, tuple(0 for _ in blocks), pause.wanted)


def _ended(copy: Copy | None) -> bool:
    return copy is not None and copy.ended()
