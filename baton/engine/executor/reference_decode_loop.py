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
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.memory.kv_cache import BlockMemory
from baton.engine.model.reference import ReferenceModel, Rows
from baton.engine.plan.decode_rows import draft_batches_up_to
from baton.engine.plan.step_plan import DecodeRows
from baton.engine.shared_memory.mailbox import EntryKind, Feature, Mailbox
from baton.engine.shared_memory.output_ring import Finish, RingWriter
from baton.engine.shared_memory.slot_progress import SlotProgress
from baton.engine.speculation.acceptance import accepted
from baton.engine.speculation.drafts import SlotDrafts
from baton.engine.speculation.prompt_lookup import PromptLookup
from baton.engine.speculation.proposer import Proposer
from baton.engine.speculation.verification_rows import VerificationRows, share_rows, usable_drafts


class ReferenceDecodeLoop(DecodeLoop):
    """A step runs when it is launched, and has run when that returns."""

    def __init__(
        self,
        reference: ReferenceModel,
        cache: BlockMemory,
        state: SlotState,
        mailbox: Mailbox,
        ring: RingWriter,
        progress: SlotProgress,
        before_step: Callable[[float], None] | None = None,
        proposer: Proposer | None = None,
        *,
        adaptive: bool = False,
    ) -> None:
        """`before_step` is called with `expected_step_s` before each step, which blocks its caller.
        `proposer`: None: drafts are looked up in the state's history, and in its lookahead table; without
        a history there are none.
        `adaptive`: see `DecodeLoop`."""
        if proposer is None and state.history is not None:
            proposer = PromptLookup(state.history, state.lookahead)
        batches = draft_batches_up_to(state.shape) if proposer is not None else ()
        super().__init__(state, mailbox, ring, progress, draft_batches=batches, adaptive=adaptive)
        self._proposer = proposer
        self._before_step = before_step
        self._reference = reference
        self._cache = cache
        self._tokens_decoded = 0
        # Words that the reader had taken when a step last found no room.
        self._tail_when_full = -1

    @property
    def tokens_decoded(self) -> int:
        return self._tokens_decoded

    def observe(self) -> None:
        state, box = self.state, self._mailbox
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
        """Runs a step over all slots that can advance, however large the batch; with drafts of as many rows
        as the batch has beyond these."""
        self._count_launch(rows)
        if not self._has_room():
            self._kinds.clear()
            self._tail_when_full = self.ring.tail
            self.ring.count_full()
            return
        self._apply_mailbox()
        runnable = self._runnable_rows()
        if runnable.numel():
            if self._before_step is not None:
                self._before_step(self.expected_step_s)
            began = time.monotonic()
            if rows.drafts:
                self._propose(runnable)
            self._advance(self._rows(runnable, rows), between_layers)
            seconds = time.monotonic() - began
            self.times.add(seconds, self._tokens_decoded)
            self._count_ended(1, seconds)
        self._kinds.clear()  # of one that advanced no slot
        self.ring.count_step()

    def _has_room(self) -> bool:
        return self.ring.room() >= self.shape.least_words

    def _apply_mailbox(self) -> None:
        for entry in self._mailbox.take(self.ring.steps, limit=self.shape.slots):
            slot, generation = int(entry["slot"]), int(entry["generation"])
            if entry["kind"] == EntryKind.ADMIT:
                self.state.admit(entry)
                logprobs = self.state.sampler.last_logprobs(slot)
                self.ring.write([int(entry["last_token"])], [slot], [generation], [Finish.NONE], logprobs)
            elif not self.state.is_current(entry):
                continue  # it ended before the entry came
            elif entry["kind"] == EntryKind.EXTEND:
                self.state.capacity[slot] = int(entry["capacity"])
            else:
                self.state.active[slot] = False
                finish = Finish.PREEMPTED if entry["kind"] == EntryKind.PREEMPT else Finish.CANCELLED
                self.ring.write([0], [slot], [generation], [finish])

    def _held(self) -> Tensor:
        """Active slots without a block for their next token, or without that token's mask where they need
        one."""
        state = self.state
        held = state.position >= state.capacity
        held |= state.sampler.waits(state.generation, state.position + 1)
        return held & state.active

    def _runnable_rows(self) -> Tensor:
        """Slots that advance in this step; the others that are active are counted."""
        held = self._held()
        if bool(held.any()):
            self.ring.count_held(int(held.sum()))
        return torch.nonzero(self.state.active & ~held).flatten()

    def _rows(self, slots: Tensor, step: DecodeRows) -> VerificationRows:
        """The rows of the slots that advance, and of as many of their drafts as there is room for."""
        state = self.state
        last_token, position = state.last_token[slots], state.position[slots]
        if not step.drafts or state.drafts is None:
            return VerificationRows.plain(slots, last_token, position)
        spare = min(step.batch, self.ring.room()) - len(slots)
        counts = share_rows(self._usable_drafts(slots, state.drafts), spare, self.ring.steps % len(slots))
        return VerificationRows.of(slots, last_token, position, state.drafts.tokens[slots], counts)

    def _usable_drafts(self, slots: Tensor, drafts: SlotDrafts) -> Tensor:
        state, sampler = self.state, self.state.sampler
        position = state.position[slots].long()
        return usable_drafts(
            drafts.counts_of(slots, state.generation[slots], position).long(),
            sampler.most_drafts[slots].long(),
            position,
            state.capacity[slots].long(),
            state.end[slots].long(),
            (sampler.features[slots] & int(Feature.MASKED)) != 0,
        )

    def _advance(self, rows: VerificationRows, between_layers: Callable[[], None] | None) -> None:
        state = self.state
        hidden = self._reference.forward(
            Rows(
                token_ids=rows.token,
                positions=rows.position,
                query_start=rows.begins.tolist(),
                block_tables=tuple(table[rows.slots].long() for table in state.block_tables),
            ),
            self._cache,
            between_layers,
        )
        logits = self._reference.logits(hidden)
        drafts = rows.drafts_before() if len(rows.slot) > len(rows.slots) else None
        tokens = state.sampler.draw(logits, rows.slot, rows.position + 1, state.stop_ids, drafts)
        finish = self._finish_of(rows, tokens)
        counts = accepted(rows.depth, rows.token, tokens, finish != Finish.NONE)
        self._publish(rows, counts)
        slots, tokens, finish = rows.slot[counts], tokens[counts], finish[counts]
        position = rows.position[counts] + 1
        state.sampler.count(slots, tokens)
        if state.history is not None:
            state.history.append(slots, position, tokens)
        # Of a slot's rows that count, the last one is where it stands.
        last = torch.cat((rows.depth[counts][1:] == 0, rows.depth.new_ones(1, dtype=torch.bool)))
        state.last_token[slots[last]] = tokens[last].int()
        state.position[slots[last]] = position[last].int()
        state.active[slots[last]] = finish[last] == Finish.NONE
        logprobs = state.sampler.report(logits[counts], tokens, slots)
        generations = state.generation[slots].tolist()
        self.ring.write(tokens.tolist(), slots.tolist(), generations, finish.tolist(), logprobs)
        self._tokens_decoded += len(slots)

    def _finish_of(self, rows: VerificationRows, tokens: Tensor) -> Tensor:
        """Says why each row's token would end its sequence."""
        state = self.state
        stopped = (state.stop_ids[rows.slot] == tokens[:, None]).any(dim=1)
        # Sequence length after this token is position + 2: indices 0 .. position + 1.
        full = rows.position + 2 >= state.end[rows.slot]
        at_end = torch.where(full, int(Finish.LENGTH), int(Finish.NONE))
        return torch.where(stopped, int(Finish.STOP), at_end)

    def _publish(self, rows: VerificationRows, counts: Tensor) -> None:
        """Writes the slots' lines of progress: before the ring's words, which a reader looks for first."""
        state, slots = self.state, rows.slots
        sources = torch.zeros_like(slots) if state.drafts is None else state.drafts.source[slots]
        position = rows.position[rows.begins[:-1]] + rows.given(counts)
        self.progress.publish(
            slots.tolist(),
            state.generation[slots].tolist(),
            position.tolist(),
            rows.progress(counts, sources).cpu().numpy(),
        )

    def _propose(self, slots: Tensor) -> None:
        """Has drafts proposed of the slots that this step advances, those admitted just now among them."""
        state = self.state
        if self._proposer is None or state.drafts is None:
            return
        going = slots[state.sampler.most_drafts[slots] > 0]
        if going.numel():
            tokens, lengths, sources = self._proposer.propose(going)
            tags = state.generation[going].long() << 32 | state.position[going].long()
            state.drafts.put(going, tags, tokens, lengths, sources)
