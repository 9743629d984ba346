"""Incremental allocation of KV blocks for running sequences, and preemption where there are none.

A reservation has blocks for its prompt and for as many output tokens as most recent outputs had. The steps
publish how far each sequence has come; steps that have been launched since take it further, each by as many
tokens as its steps gave out on average. Shortly before it should run out of blocks, it is allocated more.
Near the end of its blocks its steps leave drafts out; at the end it is stalled, and continues once the steps
have applied the mailbox entry that extends its block table.

Where no block is free, the sequence with the most output left is swapped out: its blocks are copied to host
memory. Where that is full too, it is preempted: it ends here, and the router has its prompt and output so far
prefilled again on a worker that has room.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.blocks import OutOfBlocksError
from baton.engine.memory.host_blocks import HostBlocks
from baton.engine.shared_memory.slot_progress import position_tag
from services.worker.engine.decode.output_lengths import OutputLengths
from services.worker.engine.decode.reservation import Reservation, SlotKey
from services.worker.engine.decode.swapping import SwappedSequences

# Tokens' worth of blocks in one allocation,
ALLOCATION_TOKENS = 64
# and how many steps before they are needed, beside those that have been launched: one more is launched before
# the next turn, and of a step's mailbox entries 16 are read at a time.
_AHEAD_STEPS = 6
_NEVER = np.iinfo(np.int64).max


class BlockAllocation:
    """Allocates blocks to the running sequences of one engine. All calls come from the engine's loop."""

    def __init__(self, pools: BlockPools, loop: DecodeLoop, host: HostBlocks) -> None:
        self._pools = pools
        self._swapped = SwappedSequences(pools, loop, host)
        self._loop = loop
        self._running: dict[SlotKey, Reservation] = {}
        # By slot: the generation and position (`position_tag`) at which its sequence needs more blocks.
        self._ends_at = np.full(len(loop.progress.tags), _NEVER)
        # Sequences that need blocks and have not got them.
        self._short: deque[SlotKey] = deque()
        self.output_lengths = OutputLengths()
        self.allocations = 0
        self.swapped_out = 0
        self.preempted = 0

    @property
    def waiting(self) -> bool:
        """True if running sequences wait for blocks; they come before new reservations."""
        return bool(self._short or self._swapped)

    @property
    def running(self) -> int:
        """Number of sequences that are decoded."""
        return len(self._running)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that the running sequences have had of a step on average; 0 where none has had any."""
        progress = [self._loop.progress.progress(*key) for key in self._running]
        steps = sum(one.steps for one in progress)
        return 1 + sum(one.accepted for one in progress) / steps if steps else 0.0

    @property
    def context_tokens(self) -> int:
        """Tokens that the running sequences have KV of together, as of the last step that has ended."""
        return sum(map(self._position, self._running.values()))

    def add(self, reservation: Reservation) -> None:
        """Adds an admitted sequence: its `token_count` tokens have KV, its last token has none."""
        self._running[reservation.key] = reservation
        self._watch(reservation)

    def remove(self, key: SlotKey, output_tokens: int | None = None) -> None:
        """Removes a sequence whose slot has ended, or a reservation that was never used. `output_tokens`: the
        length of its output, where that is known."""
        reservation = self._running.pop(key, None)
        if reservation is None:
            return
        self._ends_at[key[0]] = _NEVER
        if key in self._swapped:
            self._swapped.remove(key)
        if not reservation.ending:
            # The last token has no KV, and does not count in the position.
            advanced = self._position(reservation) - reservation.token_count
            self.output_lengths.add(advanced if output_tokens is None else output_tokens - 1)

    def step(self) -> None:
        """Allocates blocks to the sequences that are due; frees some where there are none."""
        self._short.extend(self._due())
        while self._short:
            key = self._short[0]
            if key in self._running and self._stays(key):
                try:
                    self._extend(self._running[key])
                except OutOfBlocksError:
                    self._make_room(self._running[key])
                    break
            self._short.popleft()
        for key in self._swapped.step(may_return=not self._short):
            self._watch(self._running[key])

    def _due(self) -> list[SlotKey]:
        """Sequences that the launched steps may bring near the end of their blocks; each once, until it is
        watched again."""
        slots = np.flatnonzero(self._loop.furthest_tags(_AHEAD_STEPS) >= self._ends_at)
        keys = [(int(slot), int(self._ends_at[slot]) >> 32) for slot in slots]
        self._ends_at[slots] = _NEVER
        return keys

    def _watch(self, reservation: Reservation) -> None:
        """Notes the position at which the sequence needs more blocks."""
        slot, generation = reservation.key
        capacity, position = reservation.grant.capacity, self._position(reservation)
        if capacity == reservation.most_tokens:
            return
        if position + _AHEAD_STEPS >= capacity:  # it may not have advanced, and so have published nothing
            self._short.append(reservation.key)
        else:
            self._ends_at[slot] = position_tag(generation, capacity)

    def _stays(self, key: SlotKey) -> bool:
        return not (self._running[key].ending or key in self._swapped)

    def _extend(self, reservation: Reservation) -> None:
        before, capacity = reservation.blocks, self._next_capacity(reservation)
        more = self._pools.allocate_more(before, capacity)
        reservation.append_blocks(more, capacity)
        self._loop.extend(*reservation.key, more, tuple(map(len, before)), capacity)
        self._watch(reservation)
        self.allocations += 1

    def _next_capacity(self, reservation: Reservation) -> int:
        return min(reservation.grant.capacity + ALLOCATION_TOKENS, reservation.most_tokens)

    def _position(self, reservation: Reservation) -> int:
        """The position of its last token when the last step ended."""
        published = self._loop.progress.position(*reservation.key)
        return reservation.token_count if published is None else published

    def _make_room(self, short: Reservation) -> None:
        """Swaps out or preempts one sequence, unless enough blocks are being freed already."""
        lacking = self._pools.lacking(short.blocks, self._next_capacity(short))
        ending = [one.blocks for one in self._running.values() if one.ending]
        coming = self._pools.freed_with(ending + self._swapped.blocks_being_freed())
        if all(map(_enough, lacking, self._pools.available(), coming)):
            return
        key = max(filter(self._stays, self._running), key=lambda key: self._left(self._running[key]))
        victim = self._running[key]
        if self._swapped.fits(victim):
            self._ends_at[key[0]] = _NEVER
            self._swapped.swap_out(victim, self._next_capacity(victim))
            self.swapped_out += 1
        else:
            victim.ending = True
            self._loop.preempt(*key)
            self.preempted += 1

    def _left(self, reservation: Reservation) -> int:
        return reservation.end - self._position(reservation)


def _enough(lacking: int, available: int, coming: int) -> bool:
    return lacking <= available + coming
