"""Which prompt tokens the next prefill step computes. Torch-free.

First come, first served, under a token budget: a prompt longer than the budget is computed in
chunks, and what a chunk leaves of the budget goes to the next prompt. A sequence starts only when
the pools hold all blocks of its prompt; those behind it wait, so that none is starved.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.engine.blocks import BlockPools, OutOfBlocksError
from baton.engine.sequence import Sequence
from baton.errors import BatonError, ErrorKind


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `start + count` of one sequence."""

    sequence: Sequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        return self.start + self.count == self.sequence.length


class PrefillScheduler:
    """Sequences that wait or run; the owner of their blocks until `remove`."""

    def __init__(self, pools: BlockPools, *, chunk_tokens: int, max_sequences: int) -> None:
        self._pools = pools
        self._chunk_tokens = chunk_tokens
        self._max_sequences = max_sequences
        self._sequences: deque[Sequence] = deque()

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(self._sequences)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not computed yet."""
        return sum(sequence.length - sequence.computed for sequence in self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Raises BatonError: INVALID where the prompt can never fit, OVERLOADED where the queue is full."""
        if sequence.blocks is None and not self._pools.fits_ever(sequence.length):
            raise BatonError(
                ErrorKind.INVALID, f"a prompt of {sequence.length} tokens exceeds this worker's KV cache"
            )
        if len(self._sequences) >= self._max_sequences:
            raise BatonError(ErrorKind.OVERLOADED, f"{self._max_sequences} prefills wait already")
        self._sequences.append(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks; the caller computes all of them, then calls `computed`."""
        chunks: list[Chunk] = []
        budget = self._chunk_tokens
        for sequence in self._sequences:
            if sequence.computed == sequence.length:
                continue
            if budget == 0 or not self._has_blocks(sequence):
                break
            count = min(budget, sequence.length - sequence.computed)
            chunks.append(Chunk(sequence, sequence.computed, count))
            budget -= count
        return chunks

    def computed(self, chunk: Chunk) -> None:
        chunk.sequence.computed = chunk.start + chunk.count

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence and frees its blocks, borrowed ones excepted; idempotent."""
        if sequence not in self._sequences:
            return
        self._sequences.remove(sequence)
        if sequence.blocks is not None and not sequence.borrowed:
            self._pools.release(sequence.blocks)

    def _has_blocks(self, sequence: Sequence) -> bool:
        if sequence.blocks is None:
            try:
                sequence.blocks = self._pools.allocate(sequence.length)
            except OutOfBlocksError:
                return False
        return True
