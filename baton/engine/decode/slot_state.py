"""The state of all slots in a decode step, as arrays on the device: one row a slot.

A slot's row of `records` is its admission's mailbox entry, copied whole; the steps advance `last_token` and
`position` in it. So a kernel admits by copying 128 bytes, and every array below is a column of `records`.

The steps write these arrays. The host writes (`SlotWrite`) only for a slot that is not active, before its
admission is posted, or block table entries of an active one that no step reads before it has applied the
mailbox entry with the slot's new capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.memory.blocks import BlockTables
from baton.engine.sampling.slot_sampler import SlotSampler
from baton.engine.shared_memory.logprob_records import Logprobs
from baton.engine.shared_memory.mailbox import ENTRY, MAX_STOP_IDS, Entry, field_offset
from baton.engine.shared_memory.step_shape import StepShape
from baton.engine.speculation.drafts import SlotDrafts
from baton.engine.speculation.history import History
from baton.engine.speculation.lookahead_table import LookaheadTable


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """The data that the host gives one slot beside its mailbox entry, because it does not fit into an entry.

    `blocks`: its block table, by cache group; with `first_blocks` only the entries from those places on, else
    all of the row, whose rest then points at the scratch block. `logit_bias`: (token, bias). `counted`: the
    tokens of its prompt and of its output, for penalties. `last_logprobs`: of the token that it is admitted
    with. `text`: the tokens that drafts are looked up in, those that have KV and those that the request
    predicts; `appended`: (position, token) of the one that it is admitted with.
    """

    slot: int
    blocks: BlockTables | None = None
    first_blocks: tuple[int, ...] | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    counted: tuple[Sequence[int], Sequence[int]] | None = None
    last_logprobs: Logprobs | None = None
    text: tuple[Sequence[int], Sequence[int]] | None = None
    appended: tuple[int, int] | None = None


class SlotState:
    """Arrays of `slots` rows; `max_blocks` is the widest block table, by cache group.

    `records` [slots, 128] uint8; its columns are int32: `generation`, `last_token`, `position` (of
    last_token, whose KV is not computed yet), `end` (length of the sequence at which it ends), `capacity`
    (tokens its granted blocks hold), `stop_ids` (unused places negative). `block_tables`: [slots, width]
    int32 a cache group. `rows_per_slot`: of the steps' rows; see `StepShape`. `drafts`: None where a slot has
    one row. `history`: of `lookup_tokens` tokens a slot; None where these are 0. `lookahead`: what histories
    of ended sequences are kept in; None: nothing.
    """

    def __init__(
        self,
        slots: int,
        max_blocks: tuple[int, ...],
        vocab_size: int,
        device: torch.device,
        rows_per_slot: int = 1,
        lookup_tokens: int = 0,
        lookahead: LookaheadTable | None = None,
    ) -> None:
        """Raises ValueError for a table without histories, which it is filled from."""
        if lookahead is not None and not lookup_tokens:
            raise ValueError("a lookahead table is filled from histories, of which there are none")
        self.shape = StepShape(slots, rows_per_slot)
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
        self.drafts = SlotDrafts(slots, device) if rows_per_slot > 1 else None
        self.history = History(slots, lookup_tokens, device) if lookup_tokens else None
        self.lookahead = lookahead
        self.block_tables = tuple(
            torch.zeros(slots, width, dtype=torch.int32, device=device) for width in max_blocks
        )
        self._tables = [self.block_tables]

    def _column(self, field: str) -> Tensor:
        return self.records.view(torch.int32)[:, field_offset(field) // 4]

    def tables_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Makes a copy of `block_tables`, as they are before any sequence, on another device of the worker;
        from now on whatever is written to these is written to it as well."""
        self._tables.append(tuple(torch.zeros_like(table, device=device) for table in self.block_tables))
        return self._tables[-1]

    def apply(self, write: SlotWrite) -> None:
        """Copies what the host gives a slot into its arrays, block tables on every device."""
        slot = write.slot
        if write.blocks is not None:
            self._write_blocks(slot, write.blocks, write.first_blocks)
        if write.logit_bias:
            self.sampler.set_bias(slot, write.logit_bias)
        if write.counted is not None:
            self.sampler.counts.set(slot, *write.counted)
        if write.last_logprobs is not None:
            self.sampler.set_last_logprobs(slot, write.last_logprobs)
        if self.history is not None:
            if write.text is not None:
                self.history.fill(slot, *write.text)
            if write.appended is not None:
                self.history.add(slot, *write.appended)

    def _write_blocks(self, slot: int, tables: BlockTables, first: tuple[int, ...] | None) -> None:
        for group, (mine, blocks) in enumerate(zip(self.block_tables, tables, strict=True)):
            written, start = torch.tensor(blocks, dtype=torch.int32), 0
            if first is None:
                row = torch.zeros(mine.shape[1], dtype=torch.int32)
                row[: len(blocks)] = written
                written = row
            else:
                start = first[group]
            # From pageable memory: each copy has ended when it returns, whatever device it goes to.
            for each in self._tables:
                each[group][slot, start : start + len(written)].copy_(written)

    def admit(self, entry: Entry) -> None:
        slot = int(entry["slot"])
        self.records[slot].copy_(torch.from_numpy(entry.reshape(1).view("u1").copy()))
        self.active[slot] = True

    def is_current(self, entry: Entry) -> bool:
        """True if the entry is for the sequence that its slot has now."""
        slot = int(entry["slot"])
        return bool(self.active[slot]) and int(self.generation[slot]) == int(entry["generation"])
