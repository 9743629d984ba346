"""Draws first tokens: the same sampler as the decode step's, its arrays made from the sequences each time.

Nothing here waits for the device, except for what few requests use: logprobs, penalties, stop ids held
back, masks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from baton.device.streams.upload import put_values
from baton.engine.sampling.logit_edits import Bias, HeldStops, LogitEdits, Masks, Penalties
from baton.engine.sampling.logprobs import logprobs_of
from baton.engine.sampling.reference import Filters, Sampling, sample
from baton.engine.sampling.slot_sampler import TokenCounts
from baton.engine.sampling.token_bits import allowed_tokens
from baton.engine.sequence import SamplingParams, Sequence
from baton.engine.shared_memory.logprob_records import Logprobs

# Prompt positions whose logits stand in memory at a time; each is as wide as the vocabulary.
_POSITIONS_AT_ONCE = 64


def draw_first(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """logits [B, V] of each sequence's last position → its next token, [B] int64 on the device."""
    device = logits.device
    positions = put_values([s.length for s in sequences], torch.int64, device)
    params = [sequence.sampling for sequence in sequences]
    filters = Filters.of_params(params, logits.shape[1], device)
    return sample(logits, Sampling.of_params(params, device), positions, _edits(sequences, logits), filters)


def first_logprobs(logits: Tensor, tokens: Tensor, sequences: list[Sequence]) -> list[Logprobs | None]:
    """The logprobs of `tokens` [B], where a sequence asked for them."""
    logprobs: list[Logprobs | None] = [None] * len(sequences)
    asked = [row for row, s in enumerate(sequences) if s.sampling.logprobs is not None]
    if asked:
        counts = [sequences[row].sampling.logprobs or 0 for row in asked]
        for row, its in zip(asked, logprobs_of(logits, tokens, asked, counts).all(), strict=True):
            logprobs[row] = its
    return logprobs


def prompt_logprobs(
    hidden: Tensor, head: Callable[[Tensor], Tensor], sequence: Sequence, start: int
) -> list[Logprobs]:
    """hidden [N, hidden] of positions `start` on → the logprobs of the prompt's tokens from start + 1 on.

    N of them, or fewer where the prompt ends before: what earlier attempts emitted is not the prompt's.
    `head`: hidden [M, hidden] → logits [M, V].
    """
    targets = sequence.token_ids[start + 1 : min(start + 1 + hidden.shape[0], sequence.prompt_length)]
    found: list[Logprobs] = []
    while len(found) < len(targets):
        tokens = targets[len(found) : len(found) + _POSITIONS_AT_ONCE]
        logits = head(hidden[len(found) : len(found) + len(tokens)])
        rows, counts = list(range(len(tokens))), [sequence.sampling.logprobs or 0] * len(tokens)
        found += logprobs_of(logits, torch.tensor(tokens, device=hidden.device), rows, counts).all()
    return found


def _edits(sequences: list[Sequence], logits: Tensor) -> LogitEdits:
    biased = [row for row, s in enumerate(sequences) if s.sampling.logit_bias]
    penalized = [row for row, s in enumerate(sequences) if s.sampling.penalizes]
    held = [
        row for row, s in enumerate(sequences) if s.length < s.stops_from and len(s.limits.stop_token_ids)
    ]
    masked = [row for row, s in enumerate(sequences) if s.mask is not None]
    return LogitEdits(
        bias=_bias(biased, sequences, logits.device) if biased else None,
        penalties=_penalties(penalized, sequences, logits) if penalized else None,
        held_stops=_held_stops(held, sequences, logits.device) if held else None,
        masks=_masks(masked, sequences, logits) if masked else None,
    )


def _bias(rows: list[int], sequences: list[Sequence], device: torch.device) -> Bias:
    entries = [list(sequences[row].sampling.logit_bias) for row in rows]
    width = max(len(mine) for mine in entries)
    padded = [mine + [(0, 0.0)] * (width - len(mine)) for mine in entries]
    return Bias(
        rows=put_values(rows, torch.int64, device),
        ids=put_values([[token for token, _ in mine] for mine in padded], torch.int64, device),
        values=put_values([[value for _, value in mine] for mine in padded], torch.float32, device),
    )


def _penalties(rows: list[int], sequences: list[Sequence], logits: Tensor) -> Penalties:
    counts = TokenCounts.zeros(len(rows), logits.shape[1], logits.device)
    for index, row in enumerate(rows):
        tokens, length = sequences[row].token_ids, sequences[row].prompt_length
        counts.set(index, tokens[:length], tokens[length:])

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)

    params: list[SamplingParams] = [sequences[row].sampling for row in rows]
    return Penalties(
        rows=torch.tensor(rows, device=logits.device),
        repetition=column([p.repetition_penalty for p in params]),
        presence=column([p.presence_penalty for p in params]),
        frequency=column([p.frequency_penalty for p in params]),
        in_prompt=counts.in_prompt,
        output_counts=counts.in_output,
    )


def _held_stops(rows: list[int], sequences: list[Sequence], device: torch.device) -> HeldStops:
    ids = [list(sequences[row].limits.stop_token_ids) for row in rows]
    width = max(len(mine) for mine in ids)
    padded = [mine + [-1] * (width - len(mine)) for mine in ids]
    return HeldStops(torch.tensor(rows, device=device), torch.tensor(padded, device=device))


def _masks(rows: list[int], sequences: list[Sequence], logits: Tensor) -> Masks:
    bits = np.stack([mask for row in rows if (mask := sequences[row].mask) is not None])
    words = torch.from_numpy(bits.view(np.int32)).to(logits.device)
    return Masks(torch.tensor(rows, device=logits.device), allowed_tokens(words, logits.shape[1]))
