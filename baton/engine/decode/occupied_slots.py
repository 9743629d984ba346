"""Attention of slots that no sequence has yet, so that a start can measure what it takes by rows and
sequences.

The slots read blocks all over the cache, as sequences of typical length would, and write to the scratch
block. Nothing else of a step runs, so neither the ring nor the slots' records take notice.
"""

from __future__ import annotations

import torch

from baton.device.streams.graphs import Graph, GraphStream
from baton.engine.decode.graph_step import GraphStep
from baton.engine.decode.slot_state import SlotState
from baton.engine.memory.kv_cache import KVCache
from baton.engine.shared_memory.step_shape import StepShape

# Tokens of context of each slot, where tables are wide enough.
_CONTEXT = 1024
_SCRATCH_BLOCK = 0


class OccupiedSlots:
    """Writes rows, positions and block tables of a step. `clear` leaves them as they were before there was
    any sequence."""

    def __init__(self, step: GraphStep, state: SlotState, cache: KVCache, queue: GraphStream) -> None:
        self._step, self._state, self._cache, self._queue = step, state, cache, queue
        groups = zip(state.block_tables, cache.layout.groups, strict=True)
        widths = [table.shape[1] * group.block_tokens for table, group in groups]
        fixed = step.pass_.policy(1).fixed  # parts of which each row is to have one
        most = min([_CONTEXT, *widths] if fixed is None else [_CONTEXT, fixed, *widths])
        self.context = max(most - state.shape.rows_per_slot, 1)
        """The position of each slot's first row."""

    def attention(self, rows: int, *, drafts: bool) -> Graph:
        """A graph of the attention of all layers, in a step of up to `rows` rows."""
        return self._queue.capture(lambda: self._step.attend_alone(rows, drafts=drafts))

    def occupy(self, rows: int, sequences: int) -> None:
        """Gives `rows` rows to the first `sequences` slots, as evenly as possible; none if there are no
        sequences."""
        each = torch.arange(rows if sequences else 0)
        depth, slot = each // max(sequences, 1), each % max(sequences, 1)
        # A slot's rows lie side by side.
        order = torch.argsort(slot, stable=True)
        self._fill_tables(sequences)
        self._step.set_rows(slot[order], self.context + depth[order], depth[order])
        if self._queue.on_chip:
            torch.cuda.synchronize()

    def clear(self) -> None:
        """Takes the rows and blocks away again."""
        for table in self._state.block_tables:
            table.zero_()
        self.occupy(0, 0)

    def _fill_tables(self, sequences: int) -> None:
        for table, group, pool in zip(
            self._state.block_tables, self._cache.layout.groups, self._cache.storage, strict=True
        ):
            count = self.context // group.block_tokens
            if sequences and count and len(pool) > 1:
                blocks = torch.arange(sequences * count, dtype=torch.int32) % (len(pool) - 1) + 1
                table[:sequences, :count] = blocks.view(sequences, count).to(table.device)


def sizes_to_measure(rows: int, shape: StepShape) -> list[int]:
    """Numbers of sequences by which attention in steps of `rows` rows with drafts is measured: between those
    in which each has all the rows that it may have and those in which it has one."""
    wanted = -(-rows // shape.rows_per_slot), max(rows // 2, 1), rows
    return sorted({min(each, shape.slots) for each in wanted})
