"""The sampler's part of the slots: parameters, bias, token counts and masks, one row a slot.

Token counts are as wide as the vocabulary; only the rows of slots whose requests penalise repetition are
ever touched. `SlotSampler.draw` is what a GPU's graph is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.sampling.logit_edits import NO_EDITS, Bias, HeldStops, LogitEdits, Masks, Penalties
from baton.engine.sampling.logprobs import logprobs_of
from baton.engine.sampling.reference import Sampling, sample
from baton.engine.sampling.slot_masks import SlotMasks
from baton.engine.sequence import MAX_LOGIT_BIAS
from baton.engine.shared_memory.logprob_records import MAX_LOGPROBS, LogprobBatch, Logprobs
from baton.engine.shared_memory.mailbox import ENTRY, Feature, field_offset

_EDITS = Feature.BIAS | Feature.PENALTIES | Feature.MIN_TOKENS | Feature.MASKED


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens that each row has had: `in_prompt` [rows, V] bool, `in_output` [rows, V] int32."""

    in_prompt: Tensor
    in_output: Tensor

    @classmethod
    def zeros(cls, rows: int, vocab_size: int, device: torch.device) -> TokenCounts:
        return cls(
            torch.zeros(rows, vocab_size, dtype=torch.bool, device=device),
            torch.zeros(rows, vocab_size, dtype=torch.int32, device=device),
        )

    def set(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Replaces one row's counts; they are complete when this returns, for every stream."""
        self.in_prompt[row].zero_()
        self.in_prompt[row, torch.tensor(prompt, dtype=torch.int64)] = True
        tokens = torch.tensor(output, dtype=torch.int64)
        self.in_output[row] = torch.bincount(tokens, minlength=self.in_output.shape[1]).int()

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Counts the tokens that `rows` have drawn; a row may occur several times."""
        once = torch.ones_like(tokens, dtype=torch.int32)
        self.in_output.index_put_((rows, tokens), once, accumulate=True)


class SlotSampler:
    """Columns of the slots' records (`SlotState`), and what does not fit there. A slot's features are
    those that its request uses."""

    def __init__(self, records: Tensor, vocab_size: int) -> None:
        ints = records.view(torch.int32)
        words = {"<f4": records.view(torch.float32), "<i8": records.view(torch.int64)}

        def column(field: str) -> Tensor:
            array = words.get(ENTRY[field].str, ints)
            return array[:, field_offset(field) // array.element_size()]

        self.sampling = Sampling.made(column)
        self.features = column("features")
        self.logprobs = column("logprobs")
        self.most_drafts = records.view(torch.int16)[:, field_offset("most_drafts") // 2]
        self.stops_from = column("stops_from")
        self.repetition_penalty = column("repetition_penalty")
        self.presence_penalty = column("presence_penalty")
        self.frequency_penalty = column("frequency_penalty")
        slots, device = records.shape[0], records.device
        self.bias_ids = torch.zeros(slots, MAX_LOGIT_BIAS, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(slots, MAX_LOGIT_BIAS, device=device)
        # For the token that a slot is admitted with: count, logprob, MAX_LOGPROBS ids, as many logprobs;
        # the floats as their bits. What a record of the ring holds behind its lap.
        width = 2 + 2 * MAX_LOGPROBS
        self.last_records = torch.zeros(slots, width, dtype=torch.int32, device=device)
        self.counts = TokenCounts.zeros(slots, vocab_size, device)
        self.masks = SlotMasks(slots, vocab_size, device)

    def set_bias(self, slot: int, bias: Sequence[tuple[int, float]]) -> None:
        """Copies a slot's bias, at most MAX_LOGIT_BIAS entries, before its admission is posted."""
        self.bias_ids[slot].zero_()
        self.bias_values[slot].zero_()
        self.bias_ids[slot, : len(bias)] = torch.tensor([token for token, _ in bias], dtype=torch.int64)
        self.bias_values[slot, : len(bias)] = torch.tensor([value for _, value in bias])

    def set_last_logprobs(self, slot: int, logprobs: Logprobs) -> None:
        """Copies those of the token that the slot is admitted with, before its admission is posted."""
        record = np.zeros(2 + 2 * MAX_LOGPROBS, dtype=np.int32)
        count, floats = len(logprobs.top), record.view(np.float32)
        record[0], floats[1] = count, logprobs.logprob
        record[2 : 2 + count] = [token for token, _ in logprobs.top]
        floats[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + count] = [value for _, value in logprobs.top]
        self.last_records[slot].copy_(torch.from_numpy(record))

    def last_logprobs(self, slot: int) -> LogprobBatch | None:
        """Reads the logprobs that `set_last_logprobs` copied; None if the admitted request asks for none."""
        if not int(self.features[slot]) & Feature.LOGPROBS:
            return None
        record = self.last_records[slot].cpu().numpy()
        count, floats = int(record[0]), record.view(np.float32).astype(np.float64)
        values = floats[2 + MAX_LOGPROBS :]
        return LogprobBatch(
            rows=np.zeros(1, dtype=np.int64),
            counts=np.array([count]),
            chosen=floats[1:2],
            ids=record[None, 2 : 2 + count].astype(np.int64),
            values=values[None, :count],
        )

    def waits(self, generations: Tensor, positions: Tensor) -> Tensor:
        """True for each slot [slots] whose request needs a mask for the token at that position, and has
        none."""
        masked = (self.features & int(Feature.MASKED)) != 0
        if not bool(masked.any()):  # every step asks
            return masked
        slots = torch.arange(positions.shape[0], device=positions.device)
        return masked & ~self.masks.ready(slots, generations, positions)

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        stop_ids: Tensor,
        drafts: Tensor | None = None,
    ) -> Tensor:
        """Draws a token for each of `rows` (slots [B], each any number of times) → [B].

        logits [B, V]; positions [B], the index in its sequence of each token; stop_ids [slots, n], unused
        places negative. `drafts` [B, n]: tokens that penalties count beside the output so far, unused places
        negative. What is drawn is not counted: `count` does that.
        """
        features = self.features[rows]
        needed = _union(features)
        if needed & ~Feature.DRAFTS == Feature.GREEDY:
            return logits.argmax(-1)
        edits = self.edits(rows, features, positions, stop_ids, drafts) if needed & _EDITS else NO_EDITS
        return sample(logits, self.sampling.at(rows), positions, edits)

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """Counts tokens [B] that were drawn for `rows` (slots [B], each any number of times) and given
        out."""
        penalized = _having(Feature.PENALTIES, self.features[rows])
        if penalized.numel():
            self.counts.add(rows[penalized], tokens[penalized])

    def edits(
        self,
        rows: Tensor,
        features: Tensor,
        positions: Tensor,
        stop_ids: Tensor,
        drafts: Tensor | None = None,
    ) -> LogitEdits:
        biased, penalized = _having(Feature.BIAS, features), _having(Feature.PENALTIES, features)
        early = (features & Feature.MIN_TOKENS != 0) & (positions < self.stops_from[rows])
        held = torch.nonzero(early).flatten()
        masked = _having(Feature.MASKED, features)
        bias = penalties = held_stops = masks = None
        if biased.numel():
            slots = rows[biased]
            bias = Bias(biased, self.bias_ids[slots], self.bias_values[slots])
        if penalized.numel():
            slots = rows[penalized]
            output_counts = self.counts.in_output[slots]
            if drafts is not None:
                _add(output_counts, drafts[penalized])
            penalties = Penalties(
                rows=penalized,
                repetition=self.repetition_penalty[slots],
                presence=self.presence_penalty[slots],
                frequency=self.frequency_penalty[slots],
                in_prompt=self.counts.in_prompt[slots],
                output_counts=output_counts,
            )
        if held.numel():
            held_stops = HeldStops(held, stop_ids[rows[held]])
        if masked.numel():
            masks = Masks(masked, self.masks.allowed(rows[masked]))
        return LogitEdits(bias, penalties, held_stops, masks)

    def report(self, logits: Tensor, tokens: Tensor, rows: Tensor) -> LogprobBatch | None:
        """The logprobs of tokens [B] given out, where their slots' requests ask for them; `rows`: those slots
        [B]. logits [B, V]."""
        asked = _having(Feature.LOGPROBS, self.features[rows])
        if not asked.numel():
            return None
        return logprobs_of(logits, tokens, asked.tolist(), self.logprobs[rows[asked]].tolist())


def _union(features: Tensor) -> int:
    """The union of all rows' features: what no row needs is skipped."""
    needed = 0
    for feature in set(features.tolist()):
        needed |= feature
    return needed


def _add(counts: Tensor, tokens: Tensor) -> None:
    """Counts tokens [B, n] in counts [B, V]; those that are negative are none."""
    row, place = torch.nonzero(tokens >= 0, as_tuple=True)
    once = torch.ones_like(row, dtype=counts.dtype)
    counts.index_put_((row, tokens[row, place]), once, accumulate=True)


def _having(feature: Feature, features: Tensor) -> Tensor:
    """Indices of the elements of `features` that have a feature."""
    return torch.nonzero(features & int(feature)).flatten()
