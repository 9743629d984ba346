"""All that a decode step knows of its slots, as arrays on the device: one row a slot.

A slot's row is its admission's mailbox entry, copied whole; `last_token` and `position` move on in it. So a
kernel admits by copying 128 bytes, and every array below is a column of `records`.

Who writes: the step itself, and the host only for a slot that is not active (its block table, bias and
token counts, before the admission is posted), or where no step reads yet (more blocks of an active one).
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.memory.blocks import BlockTables
from baton.engine.rings.mailbox import ENTRY, MAX_STOP_IDS, Entry, field_offset
from baton.engine.sampling.slot_sampler import SlotSampler


class SlotState:
    """Arrays of `slots` rows; `max_blocks` is the widest block table, by cache group.

    `records` [slots, 128] uint8; its columns are int32: `generation`, `last_token`, `position` (of
    last_token, whose KV is not computed yet), `end` (length of the sequence at which it ends), `capacity`
    (tokens its granted blocks hold), `stop_ids` (unused places negative). `block_tables`: [slots, width]
    int32 a cache group.
    """

    def __init__(
        self, slots: int, max_blocks: tuple[int, ...], vocab_size: int, device: torch.device
    ) -> None:
        self.records = torch.zeros(slots, ENTRY.itemsize, dtype=torch.uint8, device=device)
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        self.generation = self._column("generation")
        self.last_token = self._column("last_token")
        self.position = self._column("position")
        self.end = self._column("end")
        self.capacity = self._column("capacity")
        first_stop = field_offset("stop_ids") // 4
        self.stop_ids = self.records.view(torch.int32)[:, first_stop : first_stop + MAX_STOP_IDS]
        self.sampler = SlotSampler(self.records, vocab_size)
        self.block_tables = tuple(
            torch.zeros(slots, width, dtype=torch.int32, device=device) for width in max_blocks
        )

    def _column(self, field: str) -> Tensor:
        return self.records.view(torch.int32)[:, field_offset(field) // 4]

    def set_block_table(self, slot: int, tables: BlockTables) -> None:
        """Copies a sequence's blocks into the slot's row; the rest of it points at scratch."""
        for mine, blocks in zip(self.block_tables, tables, strict=True):
            row = torch.zeros(mine.shape[1], dtype=torch.int32)
            row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            mine[slot].copy_(row)

    def extend_block_table(self, slot: int, more: BlockTables, held: tuple[int, ...]) -> None:
        """Adds blocks behind the first `held` of the slot's, by cache group. The slot may be active: no step
        reads there before it has heard of its new capacity."""
        for mine, blocks, first in zip(self.block_tables, more, held, strict=True):
            mine[slot, first : first + len(blocks)].copy_(torch.tensor(blocks, dtype=torch.int32))

    def admit(self, entry: Entry) -> None:
        slot = int(entry["slot"])
        self.records[slot].copy_(torch.from_numpy(entry.reshape(1).view("u1").copy()))
        self.active[slot] = True

    def is_current(self, entry: Entry) -> bool:
        """Whether the entry speaks of the sequence that holds its slot now."""
        slot = int(entry["slot"])
        return bool(self.active[slot]) and int(self.generation[slot]) == int(entry["generation"])
