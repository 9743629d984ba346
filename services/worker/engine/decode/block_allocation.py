"""Incremental allocation of KV blocks for running sequences, and preemption where there are none.

A reservation has blocks for its prompt and for as many output tokens as most recent outputs had. How far a
sequence has come is not read back: it advances by at most one token a step, so the count of steps gives the
earliest step at which it could run out of blocks. Shortly before that it is allocated more. A slot that
reaches the end of its blocks all the same is stalled, and continues once the steps have applied the mailbox
entry that extends its block table; steps before that are not counted for it.

Where no block is free, the sequence with the most output left is swapped out: its blocks are copied to host
memory. Where that is full too, it is preempted: it ends here, and the router has its prompt and output so far
prefilled again on a worker that has room.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from baton.engine.decode.loop import DecodeLoop
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.blocks import OutOfBlocksError
from baton.engine.memory.host_blocks import HostBlocks
from baton.engine.shared_memory.step_shape import MAX_TOKENS_A_STEP
from services.worker.engine.decode.output_lengths import OutputLengths
from services.worker.engine.decode.reservation import Reservation, SlotKey
from services.worker.engine.decode.swapping import SwappedSequences

# Tokens' worth of blocks in one allocation,
ALLOCATION_TOKENS = 64
# and how many tokens before they are needed: up to three steps are enqueued, and one more has read its
# mailbox.
_AHEAD_TOKENS = 8


@dataclass(slots=True)
class _Running:
    """An admitted sequence. Its last token was at `position` at the furthest when `step` steps had run.

    `entry`: the mailbox entry without which it advances no further than `position`.
    """

    reservation: Reservation
    position: int
    step: int
    entry: int


class BlockAllocation:
    """Allocates blocks to the running sequences of one engine. All calls come from the engine's loop."""

    def __init__(self, pools: BlockPools, loop: DecodeLoop, host: HostBlocks) -> None:
        self._pools = pools
        self._swapped = SwappedSequences(pools, loop, host)
        self._loop = loop
        self._running: dict[SlotKey, _Running] = {}
        # Sequences whose entry may not have been applied by the steps yet.
        self._unapplied: dict[SlotKey, _Running] = {}
        # When each sequence may come near the end of its blocks, in steps.
        self._due: list[tuple[int, SlotKey]] = []
        # Sequences that are due and have not got their blocks.
        self._short: deque[SlotKey] = deque()
        self.output_lengths = OutputLengths()
        self.allocations = 0
        self.swapped_out = 0
        self.preempted = 0

    @property
    def waiting(self) -> bool:
        """Whether running sequences wait for blocks; they come before new reservations."""
        return bool(self._short or self._swapped)

    @property
    def running(self) -> int:
        """Sequences that are decoded."""
        return len(self._running)

    @property
    def context_tokens(self) -> int:
        """Tokens that the running sequences have together, at most."""
        return sum(map(self._position, self._running.values()))

    def add(self, reservation: Reservation) -> None:
        """Adds an admitted sequence: its `token_count` tokens have KV, its last token has none."""
        key = reservation.key
        self._running[key] = _Running(reservation, reservation.token_count, 0, 0)
        self._stop_at(key, reservation.token_count)

    def remove(self, key: SlotKey, output_tokens: int | None = None) -> None:
        """Removes a sequence whose slot has ended, or a reservation that was never used. `output_tokens`: the
        length of its output, where that is known."""
        running = self._running.pop(key, None)
        self._unapplied.pop(key, None)
        if key in self._swapped:  # where it ended before it was stalled, its position is not known
            self._swapped.remove(key)
        elif running is not None and not running.reservation.ending:
            # The last token has no KV, and does not count in the position.
            estimate = self._position(running) - running.reservation.token_count
            self.output_lengths.add(estimate if output_tokens is None else output_tokens - 1)

    def step(self) -> None:
        """Allocates blocks to the sequences that are due; frees some where there are none."""
        self._count_steps()
        while self._due and self._due[0][0] <= self._loop.ring.steps:
            self._short.append(heapq.heappop(self._due)[1])
        while self._short:
            key = self._short[0]
            if key in self._running and self._stays(key):
                try:
                    self._extend(self._running[key])
                except OutOfBlocksError:
                    self._make_room(self._running[key])
                    break
            self._short.popleft()
        for key, position in self._swapped.step(may_return=not self._short):
            self._stop_at(key, position)

    def _stop_at(self, key: SlotKey, position: int) -> None:
        """An entry was just posted without which the slot does not advance beyond `position`."""
        running = self._running[key]
        running.position, running.step, running.entry = position, self._loop.ring.steps, self._loop.posted
        self._unapplied[key] = running

    def _count_steps(self) -> None:
        """A sequence's steps count from the first one that may have applied its entry."""
        steps = self._loop.ring.steps
        for key, running in list(self._unapplied.items()):
            if self._loop.applied(running.entry):
                del self._unapplied[key]
                self._schedule(running)
            else:
                running.step = steps

    def _stays(self, key: SlotKey) -> bool:
        return not (self._running[key].reservation.ending or key in self._swapped)

    def _extend(self, running: _Running) -> None:
        reservation = running.reservation
        before, capacity = reservation.blocks, self._next_capacity(reservation)
        more = self._pools.allocate_more(before, capacity)
        position = self._position(running)
        full = position == reservation.grant.capacity
        reservation.append_blocks(more, capacity)
        self._loop.extend(*reservation.key, more, tuple(map(len, before)), capacity)
        if full:  # it may be stalled
            self._stop_at(reservation.key, position)
        else:
            running.position, running.step = position, self._loop.ring.steps
            self._schedule(running)
        self.allocations += 1

    def _next_capacity(self, reservation: Reservation) -> int:
        return min(reservation.grant.capacity + ALLOCATION_TOKENS, reservation.most_tokens)

    def _schedule(self, running: _Running) -> None:
        """Notes when the sequence is due next."""
        reservation = running.reservation
        if reservation.grant.capacity < reservation.most_tokens:
            left = reservation.grant.capacity - _AHEAD_TOKENS - running.position
            steps = left // MAX_TOKENS_A_STEP
            heapq.heappush(self._due, (running.step + steps, reservation.key))

    def _position(self, running: _Running) -> int:
        """The furthest position that its last token may have."""
        steps = self._loop.ring.steps - running.step
        position = running.position + steps * MAX_TOKENS_A_STEP
        return min(position, running.reservation.grant.capacity)

    def _make_room(self, short: _Running) -> None:
        """Swaps out or preempts one sequence, unless enough blocks are being freed already."""
        lacking = self._pools.lacking(short.reservation.blocks, self._next_capacity(short.reservation))
        ending = [one.reservation.blocks for one in self._running.values() if one.reservation.ending]
        coming = self._pools.freed_with(ending + self._swapped.blocks_being_freed())
        if all(map(_enough, lacking, self._pools.available(), coming)):
            return
        key = max(filter(self._stays, self._running), key=lambda key: self._left(self._running[key]))
        victim = self._running[key]
        if self._swapped.fits(victim.reservation):
            capacity = self._next_capacity(victim.reservation)
            self._unapplied.pop(key, None)
            self._swapped.swap_out(victim.reservation, self._position(victim), capacity)
            self.swapped_out += 1
        else:
            victim.reservation.ending = True
            self._loop.preempt(*key)
            self.preempted += 1

    def _left(self, running: _Running) -> int:
        return running.reservation.end - self._position(running)


def _enough(lacking: int, available: int, coming: int) -> bool:
    return lacking <= available + coming
