"""Blocks for running slots, granted before they need them, and room made where there are none.

A reservation has blocks for its prompt and for as many output tokens as most requests turn out to have. How
far a slot has come is not read back: it advances by at most one token a step, so the count of steps gives the
earliest moment at which it could run out. A little before that it is given more. A slot that comes to the end
of its blocks all the same is held by the step, and goes on once the steps have applied the entry that brings
more; steps before that are not counted for it.

Where no block is free, the slot with the most left to do is paused: its blocks are set aside in the host's
memory. Where that has no room either, it is moved: it ends here, and the router has prompt and output so far
prefilled again, where there is room.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.decode.loop import DecodeLoop
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.blocks import OutOfBlocksError
from baton.engine.memory.host_blocks import HostBlocks
from baton.engine.step_shape import MAX_TOKENS_A_STEP
from services.worker.engine.decode.output_lengths import OutputLengths
from services.worker.engine.decode.reservation import Key, Reservation
from services.worker.engine.decode.swapping import Pauses

# Tokens' worth of blocks that a slot is given at a time,
GROW_TOKENS = 64
# and how many tokens before it needs them: up to three steps are queued, and one more has read its mailbox.
_AHEAD_TOKENS = 8


@dataclass(slots=True)
class _Running:
    """An admitted sequence: its last token was at `position` at the furthest when `step` steps had run.

    `entry`: the mailbox entry without which it advances no further than `position`.
    """

    reservation: Reservation
    position: int
    step: int
    entry: int


class Growth:
    """Of one engine. All calls come from its loop; `move` has a slot end as moved."""

    def __init__(
        self, pools: BlockPools, loop: DecodeLoop, host: HostBlocks, move: Callable[[Reservation], None]
    ) -> None:
        self._pools = pools
        self._pauses = Pauses(pools, loop, host)
        self._loop = loop
        self._move = move
        self._running: dict[Key, _Running] = {}
        # Slots whose entry the steps have not applied yet, as far as is known.
        self._standing: dict[Key, _Running] = {}
        # When a slot may come near the end of its blocks, in steps.
        self._due: list[tuple[int, Key]] = []
        # Slots that are due, and have not got their blocks.
        self._short: deque[Key] = deque()
        self.lengths = OutputLengths()
        self.grown = 0
        self.paused = 0
        self.moved = 0

    @property
    def waiting(self) -> bool:
        """Whether slots want blocks: they come before whoever asks for a slot."""
        return bool(self._short or self._pauses)

    def watch(self, reservation: Reservation) -> None:
        """The sequence was admitted; its prompt and what was emitted before have KV, one token has none."""
        key = reservation.key
        self._running[key] = _Running(reservation, reservation.token_count, 0, 0)
        self._stand(key, reservation.token_count)

    def forget(self, key: Key, emitted: int | None = None) -> None:
        """The slot's last word was read, or its ticket was never used. `emitted`: tokens that it had in all,
        where that is known."""
        running = self._running.pop(key, None)
        self._standing.pop(key, None)
        if key in self._pauses:  # where it ended before the steps applied the hold, its position is not known
            self._pauses.end(key)
        elif running is not None and not running.reservation.leaving:
            # The last token has no KV, and gives no position.
            count = self._position(running) - running.reservation.token_count
            self.lengths.add(count if emitted is None else emitted - 1)

    def step(self) -> None:
        """Gives blocks to the slots that are due; where there are none, sees to it that some come."""
        self._count_steps()
        while self._due and self._due[0][0] <= self._loop.ring.steps:
            self._short.append(heapq.heappop(self._due)[1])
        while self._short:
            key = self._short[0]
            if key in self._running and self._stays(key):
                try:
                    self._grow(self._running[key])
                except OutOfBlocksError:
                    self._make_room(self._running[key])
                    break
            self._short.popleft()
        for key, position in self._pauses.step(may_return=not self._short):
            self._stand(key, position)

    def _stand(self, key: Key, position: int) -> None:
        """An entry was just posted without which the slot does not advance beyond `position`."""
        running = self._running[key]
        running.position, running.step, running.entry = position, self._loop.ring.steps, self._loop.posted
        self._standing[key] = running

    def _count_steps(self) -> None:
        """From the steps on that may have applied its entry, a slot's steps count."""
        steps = self._loop.ring.steps
        for key, running in list(self._standing.items()):
            if self._loop.applied(running.entry):
                del self._standing[key]
                self._expect(running)
            else:
                running.step = steps

    def _stays(self, key: Key) -> bool:
        return not (self._running[key].reservation.leaving or key in self._pauses)

    def _grow(self, running: _Running) -> None:
        reservation = running.reservation
        held, capacity = reservation.blocks, self._next_capacity(reservation)
        more = self._pools.allocate_more(held, capacity)
        position = self._position(running)
        full = position == reservation.grant.capacity
        reservation.grow(more, capacity)
        self._loop.grow(*reservation.key, more, tuple(map(len, held)), capacity)
        if full:  # it may be held
            self._stand(reservation.key, position)
        else:
            running.position, running.step = position, self._loop.ring.steps
            self._expect(running)
        self.grown += 1

    def _next_capacity(self, reservation: Reservation) -> int:
        return min(reservation.grant.capacity + GROW_TOKENS, reservation.most_tokens)

    def _expect(self, running: _Running) -> None:
        reservation = running.reservation
        if reservation.grant.capacity < reservation.most_tokens:
            left = reservation.grant.capacity - _AHEAD_TOKENS - running.position
            steps = left // MAX_TOKENS_A_STEP
            heapq.heappush(self._due, (running.step + steps, reservation.key))

    def _position(self, running: _Running) -> int:
        """Where its last token is at the furthest."""
        steps = self._loop.ring.steps - running.step
        position = running.position + steps * MAX_TOKENS_A_STEP
        return min(position, running.reservation.grant.capacity)

    def _make_room(self, short: _Running) -> None:
        """Sets one sequence aside or moves it, unless enough blocks are on their way back already."""
        lacking = self._pools.lacking(short.reservation.blocks, self._next_capacity(short.reservation))
        leaving = [one.reservation.blocks for one in self._running.values() if one.reservation.leaving]
        coming = self._pools.freed_with(leaving + self._pauses.coming())
        if all(map(_enough, lacking, self._pools.available(), coming)):
            return
        key = max(filter(self._stays, self._running), key=lambda key: self._left(self._running[key]))
        victim = self._running[key]
        if self._pauses.fits(victim.reservation):
            wanted = self._next_capacity(victim.reservation)
            self._standing.pop(key, None)
            self._pauses.begin(victim.reservation, self._position(victim), wanted)
            self.paused += 1
        else:
            self._move(victim.reservation)
            self.moved += 1

    def _left(self, running: _Running) -> int:
        return running.reservation.end - self._position(running)


def _enough(want: int, available: int, coming: int) -> bool:
    return want <= available + coming
