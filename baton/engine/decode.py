"""The decode step: every active slot advances by one token, and nothing is asked of the host.

A step applies the mailbox, runs the model over the active rows, samples, checks stops, advances,
and writes the output ring. This is the plain-torch form of what a CUDA graph does on a GPU: the
same arrays, the same rings, the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from baton.engine.cache import KVCache
from baton.engine.decoder import Decoder, Rows
from baton.engine.logprob_records import Logprobs
from baton.engine.mailbox import ENTRY, Entry, EntryKind, Feature, Mailbox
from baton.engine.output_ring import Finish, RingWriter
from baton.engine.sequence import Limits, SamplingParams
from baton.engine.slot_state import SlotState
from baton.engine.slots import Grant


class DecodeLoop:
    """The host's verbs (`admit`, `cancel`) and the `step` they take effect in."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, state: SlotState, mailbox: Mailbox, ring: RingWriter
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._state = state
        self._mailbox = mailbox
        self._ring = ring
        self._slots = state.active.shape[0]
        # Called between the layers of a step: for what need not wait for its end and touches no active slot.
        self.meanwhile: Callable[[], None] | None = None
        self.tokens_decoded = 0

    @property
    def ring(self) -> RingWriter:
        """Its counters say how many steps ran, and how many could not."""
        return self._ring

    def admit(
        self,
        grant: Grant,
        *,
        token_ids: Sequence[int],
        prompt_length: int,
        last_token: int,
        last_logprobs: Logprobs | None = None,
        end: int,
        sampling: SamplingParams,
        limits: Limits,
    ) -> None:
        """Gives a prefilled sequence its slot, from the next step on.

        `token_ids` have KV: the prompt, `prompt_length` long, and what earlier attempts emitted;
        `last_token` is the next, without KV. The slot's first word in the ring repeats it with
        `last_logprobs`, without which a request for logprobs is refused (ValueError).
        """
        if (last_logprobs is None) != (sampling.logprobs is None):
            raise ValueError("the last token comes with logprobs exactly where they are asked for")
        self._state.set_block_table(grant.slot, grant.blocks)
        if sampling.logit_bias:
            self._state.sampler.set_bias(grant.slot, sampling.logit_bias)
        if sampling.penalizes:
            output = [*token_ids[prompt_length:], last_token]
            self._state.sampler.set_counts(grant.slot, token_ids[:prompt_length], output)
        if last_logprobs is not None:
            self._state.sampler.set_last_logprobs(grant.slot, last_logprobs)
        entry = _entry(EntryKind.ADMIT, grant.slot, grant.generation, self._ring.steps)
        entry["last_token"], entry["position"] = last_token, len(token_ids)
        entry["end"], entry["capacity"] = end, grant.capacity
        entry["stop_count"] = len(limits.stop_token_ids)
        entry["stop_ids"][0, : len(limits.stop_token_ids)] = limits.stop_token_ids
        stops_from = prompt_length + limits.min_tokens
        entry["stops_from"] = stops_from
        entry["features"] = _features(sampling, held_stops=stops_from > len(token_ids) + 1)
        _write_sampling(entry, sampling)
        self._mailbox.post(entry)

    def cancel(self, slot: int, generation: int) -> None:
        """Ends a slot from the next step on; the ring tells its finish, this one or an earlier."""
        self._mailbox.post(_entry(EntryKind.CANCEL, slot, generation, self._ring.steps))

    @property
    def has_work(self) -> bool:
        """Whether a step would do something, given room in the ring."""
        return bool(self._mailbox.pending) or bool(self._state.active.any())

    def step(self) -> bool:
        """Runs one step; False when there was nothing to do or no room to say it in."""
        if not self.has_work:
            return False
        # Every entry and every row may write one word.
        if self._ring.room() < 2 * self._slots:
            self._ring.count_full()
            return False
        self._apply_mailbox()
        rows = self._runnable_rows()
        if rows.numel():
            self._advance(rows)
        self._ring.count_step()
        return True

    def _apply_mailbox(self) -> None:
        for entry in self._mailbox.take(self._ring.steps, limit=self._slots):
            slot, generation = int(entry["slot"]), int(entry["generation"])
            if entry["kind"] == EntryKind.ADMIT:
                self._state.admit(entry)
                logprobs = self._state.sampler.last_logprobs(slot)
                self._ring.write([int(entry["last_token"])], [slot], [generation], [Finish.NONE], logprobs)
            elif entry["kind"] == EntryKind.CANCEL and self._state.is_current(entry):
                self._state.active[slot] = False
                self._ring.write([0], [slot], [generation], [Finish.CANCELLED])

    def _runnable_rows(self) -> Tensor:
        """Slots that advance in this step. One without a block for its next token is held."""
        state = self._state
        held = state.active & (state.position >= state.capacity)
        if bool(held.any()):
            self._ring.count_held(int(held.sum()))
        return torch.nonzero(state.active & ~held).flatten()

    def _advance(self, rows: Tensor) -> None:
        state = self._state
        position = state.position[rows]
        hidden = self._decoder.forward(
            Rows(
                token_ids=state.last_token[rows],
                positions=position,
                query_start=list(range(rows.numel() + 1)),
                block_tables=tuple(table[rows] for table in state.block_tables),
            ),
            self._cache,
            self.meanwhile,
        )
        logits = self._decoder.logits(hidden)
        tokens, logprobs = state.sampler.draw(logits, rows, position + 1, state.stop_ids)
        stopped = (state.stop_ids[rows] == tokens[:, None]).any(dim=1)
        # Sequence length after this token is position + 2: indices 0 .. position + 1.
        full = position + 2 >= state.end[rows]
        finish = torch.where(
            stopped, int(Finish.STOP), torch.where(full, int(Finish.LENGTH), int(Finish.NONE))
        )
        state.last_token[rows] = tokens
        state.position[rows] = position + 1
        state.active[rows] = finish == Finish.NONE
        generations = state.generation[rows].tolist()
        self._ring.write(tokens.tolist(), rows.tolist(), generations, finish.tolist(), logprobs)
        self.tokens_decoded += rows.numel()


def _entry(kind: EntryKind, slot: int, generation: int, from_step: int) -> Entry:
    entry: Entry = np.zeros(1, dtype=ENTRY)
    entry["kind"], entry["slot"], entry["generation"], entry["from_step"] = kind, slot, generation, from_step
    return entry


def _write_sampling(entry: Entry, sampling: SamplingParams) -> None:
    for field in (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        entry[field] = getattr(sampling, field)
    entry["seed"] = np.uint64(sampling.seed).astype(np.int64)
    entry["logprobs"] = sampling.logprobs or 0


def _features(sampling: SamplingParams, *, held_stops: bool) -> Feature:
    features = Feature.GREEDY if sampling.temperature == 0 else Feature.TEMPERATURE
    if sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0):
        features |= Feature.FILTERS
    for feature, used in (
        (Feature.BIAS, bool(sampling.logit_bias)),
        (Feature.PENALTIES, sampling.penalizes),
        (Feature.MIN_TOKENS, held_stops),
        (Feature.LOGPROBS, sampling.logprobs is not None),
    ):
        if used:
            features |= feature
    return features
