"""All that a decode step knows of its slots, as arrays on the device: one row a slot.

Who writes: the step itself, and the host only for a slot that is not active (its block table, bias and
token counts, before the admission is posted).
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.blocks import BlockTables
from baton.engine.mailbox import MAX_STOP_IDS, Entry
from baton.engine.slot_sampler import SlotSampler

_NO_STOP = -1


class SlotState:
    """Arrays of `slots` rows; `max_blocks` is the widest block table, by cache group."""

    def __init__(
        self, slots: int, max_blocks: tuple[int, ...], vocab_size: int, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.active = zeros(slots, dtype=torch.bool)
        self.generation = zeros(slots)
        self.last_token = zeros(slots)
        self.position = zeros(slots)  # of last_token; its KV is not computed yet
        self.end = zeros(slots)  # length of the sequence at which it ends
        self.capacity = zeros(slots)  # tokens its granted blocks hold
        self.stop_ids = torch.full((slots, MAX_STOP_IDS), _NO_STOP, dtype=torch.int64, device=device)
        self.sampler = SlotSampler(slots, vocab_size, device)
        self.block_tables = tuple(zeros(slots, width) for width in max_blocks)

    def set_block_table(self, slot: int, tables: BlockTables) -> None:
        """Copies a sequence's blocks into the slot's row; the rest of it points at scratch."""
        for mine, blocks in zip(self.block_tables, tables, strict=True):
            mine[slot].zero_()
            mine[slot, : len(blocks)] = torch.tensor(blocks, dtype=torch.int64)

    def admit(self, entry: Entry) -> None:
        slot = int(entry["slot"])
        self.active[slot] = True
        for array, field in (
            (self.generation, "generation"),
            (self.last_token, "last_token"),
            (self.position, "position"),
            (self.end, "end"),
            (self.capacity, "capacity"),
        ):
            array[slot] = entry[field].item()
        self.sampler.admit(entry)
        self.stop_ids[slot] = _NO_STOP
        count = int(entry["stop_count"])
        self.stop_ids[slot, :count] = torch.tensor(entry["stop_ids"][:count].tolist(), dtype=torch.int64)

    def is_current(self, entry: Entry) -> bool:
        """Whether the entry speaks of the sequence that holds its slot now."""
        slot = int(entry["slot"])
        return bool(self.active[slot]) and int(self.generation[slot]) == int(entry["generation"])
