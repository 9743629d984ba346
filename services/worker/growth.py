"""Blocks for running slots, granted before they need them, and room made where there are none.

A reservation has blocks for its prompt and for as many output tokens as most requests turn out to have. How
far a slot is nobody asks: it advances by at most one token a step, so the count of steps says when it could
run out at the earliest. A little before that it is given more. A slot that comes to the end of its blocks all
the same is held by the step, and goes on when they come.

Where no block is free, the slot with the most left to do is moved: it ends here, and the router has prompt
and output so far prefilled again, where there is room.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.blocks import BlockPools, OutOfBlocksError
from baton.engine.decode import DecodeLoop
from services.worker.output_lengths import OutputLengths
from services.worker.reservation import Reservation

# Tokens' worth of blocks that a slot is given at a time,
GROW_TOKENS = 64
# and how many tokens before it needs them: two steps are queued, and a third has read its mailbox.
_AHEAD_TOKENS = 8

Key = tuple[int, int]  # slot, generation


@dataclass(slots=True)
class _Running:
    """An admitted sequence: its last token was at `position` when `step` steps had run."""

    reservation: Reservation
    position: int
    step: int


class Growth:
    """Of one engine. All calls come from its loop; `move` has a slot end as moved."""

    def __init__(self, pools: BlockPools, loop: DecodeLoop, move: Callable[[Reservation], None]) -> None:
        self._pools = pools
        self._loop = loop
        self._move = move
        self._running: dict[Key, _Running] = {}
        # When a slot may come near the end of its blocks, in steps.
        self._due: list[tuple[int, Key]] = []
        # Slots that are due, and have not got their blocks.
        self._short: deque[Key] = deque()
        self.lengths = OutputLengths()
        self.grown = 0
        self.moved = 0

    @property
    def waiting(self) -> bool:
        """Whether running slots want blocks: they come before whoever asks for a slot."""
        return bool(self._short)

    def watch(self, key: Key, reservation: Reservation) -> None:
        """The sequence was admitted; its prompt and what was emitted before have KV, one token has none."""
        running = _Running(reservation, reservation.token_count, self._loop.ring.steps)
        self._running[key] = running
        self._expect(key, running)

    def forget(self, key: Key) -> None:
        """The slot's last word was read, or its ticket never came to run."""
        running = self._running.pop(key, None)
        if running is not None and not running.reservation.leaving:
            self.lengths.add(self._position(running) - running.reservation.token_count)

    def step(self) -> None:
        """Gives blocks to whom they are due; where there are none, sees to it that some come."""
        while self._due and self._due[0][0] <= self._loop.ring.steps:
            self._short.append(heapq.heappop(self._due)[1])
        while self._short:
            running = self._running.get(self._short[0])
            if running is not None and not running.reservation.leaving:
                capacity = min(
                    running.reservation.grant.capacity + GROW_TOKENS, running.reservation.most_tokens
                )
                try:
                    self._grow(self._short[0], running, capacity)
                except OutOfBlocksError:
                    self._make_room(self._pools.lacking(running.reservation.grant.blocks, capacity))
                    return
            self._short.popleft()

    def _grow(self, key: Key, running: _Running, capacity: int) -> None:
        reservation = running.reservation
        grant = reservation.grant
        more = self._pools.allocate_more(grant.blocks, capacity)
        running.position, running.step = self._position(running), self._loop.ring.steps
        reservation.grow(more, capacity)
        self._loop.grow(*key, more, tuple(map(len, grant.blocks)), capacity)
        self._expect(key, running)
        self.grown += 1

    def _expect(self, key: Key, running: _Running) -> None:
        grant = running.reservation.grant
        if grant.capacity < running.reservation.most_tokens:
            left = grant.capacity - _AHEAD_TOKENS - running.position
            heapq.heappush(self._due, (running.step + left, key))

    def _position(self, running: _Running) -> int:
        """Where its last token is at the furthest."""
        position = running.position + self._loop.ring.steps - running.step
        return min(position, running.reservation.grant.capacity)

    def _make_room(self, wanted: tuple[int, ...]) -> None:
        """Moves one sequence, unless enough blocks are on their way back already."""
        staying = []
        coming = [pool.free for pool in self._pools.pools]
        for running in self._running.values():
            if running.reservation.leaving:
                blocks = running.reservation.grant.blocks
                coming = [count + len(mine) for count, mine in zip(coming, blocks, strict=True)]
            else:
                staying.append(running)
        if any(count < want for count, want in zip(coming, wanted, strict=True)):
            self._move(max(staying, key=self._left).reservation)
            self.moved += 1

    def _left(self, running: _Running) -> int:
        return running.reservation.end - self._position(running)
