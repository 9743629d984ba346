"""The decode step in plain torch: the same arrays, rings and order as a GPU's graph, on any device.

Exact in every dtype, the truth that the graph is tested against, and what runs on a CPU. The host waits
for each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from baton.engine.decode.loop import DecodeLoop
from baton.engine.decode.slot_state import SlotState
from baton.engine.device_watchdog import StepTimes
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.reference import ReferenceModel, Rows
from baton.engine.shared_memory.mailbox import EntryKind, Mailbox
from baton.engine.shared_memory.output_ring import Finish, RingWriter
from baton.engine.shared_memory.slot_positions import SlotPositions


class ReferenceDecodeLoop(DecodeLoop):
    """A step runs when `step` is called, and has run when that returns."""

    def __init__(
        self,
        reference: ReferenceModel,
        cache: KVCache,
        state: SlotState,
        mailbox: Mailbox,
        ring: RingWriter,
        positions: SlotPositions,
        before_step: Callable[[float], None] | None = None,
    ) -> None:
        """`before_step` is called with `expected_step_s` before each step, which blocks its caller."""
        super().__init__(state, mailbox, ring, positions)
        self._before_step = before_step
        self._reference = reference
        self._cache = cache
        self._tokens_decoded = 0
        self._times = StepTimes()

    @property
    def tokens_decoded(self) -> int:
        return self._tokens_decoded

    @property
    def expected_step_s(self) -> float:
        return self._times.expected_s

    @property
    def has_work(self) -> bool:
        return bool(self._mailbox.pending) or bool(self._state.active.any())

    def step(self, between_layers: Callable[[], None] | None = None) -> bool:
        if not self.has_work:
            return False
        if self.ring.room() < self.shape.words:
            self.ring.count_full()
            return False
        applied = self._apply_mailbox()
        rows = self._runnable_rows()
        if not (applied or rows.numel()):
            return False  # all are held
        if rows.numel():
            if self._before_step is not None:
                self._before_step(self.expected_step_s)
            began = time.monotonic()
            self._advance(rows, between_layers)
            self._times.add(time.monotonic() - began)
        self.ring.count_step()
        return True

    def _apply_mailbox(self) -> bool:
        entries = self._mailbox.take(self.ring.steps, limit=self.shape.slots)
        for entry in entries:
            slot, generation = int(entry["slot"]), int(entry["generation"])
            if entry["kind"] == EntryKind.ADMIT:
                self._state.admit(entry)
                logprobs = self._state.sampler.last_logprobs(slot)
                self.ring.write([int(entry["last_token"])], [slot], [generation], [Finish.NONE], logprobs)
            elif not self._state.is_current(entry):
                continue  # it ended before the entry came
            elif entry["kind"] == EntryKind.EXTEND:
                self._state.capacity[slot] = int(entry["capacity"])
            else:
                self._state.active[slot] = False
                finish = Finish.PREEMPTED if entry["kind"] == EntryKind.PREEMPT else Finish.CANCELLED
                self.ring.write([0], [slot], [generation], [finish])
        return bool(entries)

    def _runnable_rows(self) -> Tensor:
        """Slots that advance in this step. One without a block for its next token, or without that token's
        mask where it needs one, is held."""
        state = self._state
        held = state.position >= state.capacity
        held |= state.sampler.waits(state.generation, state.position + 1)
        held &= state.active
        if bool(held.any()):
            self.ring.count_held(int(held.sum()))
        return torch.nonzero(state.active & ~held).flatten()

    def _advance(self, rows: Tensor, between_layers: Callable[[], None] | None) -> None:
        state = self._state
        position = state.position[rows].long()
        hidden = self._reference.forward(
            Rows(
                token_ids=state.last_token[rows].long(),
                positions=position,
                query_start=list(range(rows.numel() + 1)),
                block_tables=tuple(table[rows].long() for table in state.block_tables),
            ),
            self._cache,
            between_layers,
        )
        logits = self._reference.logits(hidden)
        tokens, logprobs = state.sampler.draw(logits, rows, position + 1, state.stop_ids)
        stopped = (state.stop_ids[rows] == tokens[:, None]).any(dim=1)
        # Sequence length after this token is position + 2: indices 0 .. position + 1.
        full = position + 2 >= state.end[rows]
        finish = torch.where(
            stopped, int(Finish.STOP), torch.where(full, int(Finish.LENGTH), int(Finish.NONE))
        )
        state.last_token[rows] = tokens.int()
        state.position[rows] = (position + 1).int()
        state.active[rows] = finish == Finish.NONE
        generations, slots = state.generation[rows].tolist(), rows.tolist()
        self.positions.publish(slots, generations, (position + 1).tolist())
        self.ring.write(tokens.tolist(), slots, generations, finish.tolist(), logprobs)
        self._tokens_decoded += rows.numel()
