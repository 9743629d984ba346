"""The decode step in plain torch: the same arrays, rings and order as a GPU's graph, on any device.

Exact in every dtype, the truth that the graph is tested against, and what runs on a CPU. The host waits
for each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from baton.engine.decode.slot_state import SlotState
from baton.engine.device_watchdog import StepTimes
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.reference import ReferenceModel, Rows
from baton.engine.plan.step_plan import DecodeRows
from baton.engine.shared_memory.mailbox import EntryKind, Mailbox
from baton.engine.shared_memory.output_ring import Finish, RingWriter
from baton.engine.shared_memory.slot_positions import SlotPositions


class ReferenceDecodeLoop(DecodeLoop):
    """A step runs when it is launched, and has run when that returns."""

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
        # Words that the reader had taken when a step last found no room.
        self._tail_when_full = -1
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

    def observe(self) -> None:
        state, box = self._state, self._mailbox
        used = state.sampler.features[state.active].cpu().numpy()
        self.steps.saw(
            active=len(used),
            features=int(np.bitwise_or.reduce(used, initial=0)),
            applied=box.posted - box.pending,
            ended=self.ring.steps + self.ring.full_steps,
            moves=len(used) > 0 and bool((state.active & ~self._held()).any()),
        )
        self.steps.room = self._has_room() or self.ring.tail != self._tail_when_full

    def launch(self, rows: DecodeRows, between_layers: Callable[[], None] | None = None) -> None:
        """Runs a step over all slots that can advance, however large the batch."""
        self.steps.launched += 1
        if not self._has_room():
            self._tail_when_full = self.ring.tail
            self.ring.count_full()
            return
        self._apply_mailbox()
        runnable = self._runnable_rows()
        if runnable.numel():
            if self._before_step is not None:
                self._before_step(self.expected_step_s)
            began = time.monotonic()
            self._advance(runnable, between_layers)
            self._times.add(time.monotonic() - began)
        self.ring.count_step()

    def _has_room(self) -> bool:
        return self.ring.room() >= self.shape.words

    def _apply_mailbox(self) -> None:
        for entry in self._mailbox.take(self.ring.steps, limit=self.shape.slots):
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

    def _held(self) -> Tensor:
        """Active slots without a block for their next token, or without that token's mask where they need
        one."""
        state = self._state
        held = state.position >= state.capacity
        held |= state.sampler.waits(state.generation, state.position + 1)
        return held & state.active

    def _runnable_rows(self) -> Tensor:
        """Slots that advance in this step; the others that are active are counted."""
        held = self._held()
        if bool(held.any()):
            self.ring.count_held(int(held.sum()))
        return torch.nonzero(self._state.active & ~held).flatten()

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
