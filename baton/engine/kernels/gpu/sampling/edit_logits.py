"""Bias, penalties, held stops and masks, in that order, and the range of what is left: of the rows that ask.

The same numbers as `baton.engine.sampling.logit_edits`: computed in float64, rounded once. Bias and stops
are a few tokens of a row, so a program writes its chunk without them first, and then those tokens again,
whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import together
from baton.engine.kernels.gpu.sampling.sampler_rows import (
    BIASED,
    EDITED,
    FEATURES,
    FILTERED,
    FREQUENCY,
    HOLDS_STOPS,
    MASKED,
    PENALIZED,
    PRESENCE,
    REPETITION,
    STOP_IDS,
    STOPS_FROM,
    float_of,
    int_of,
    logits_of,
)
from baton.engine.kernels.gpu.step.step_kernels import RECORD_WORDS
from baton.engine.shared_memory.mailbox import MAX_STOP_IDS

_STOPS = tl.constexpr(MAX_STOP_IDS)


@triton.jit
def _penalized(
    logits, at, there, slot, features, records, in_prompt, in_output, masks, drafts, depth,
    VOCAB: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """logits float64 of the tokens `at` of a slot's row, after penalties and mask. DRAFTS: the row's token
    `drafts[0]` and those of the rows before it are drafts, `depth` in all, which are in its output."""
    if features & PENALIZED:
        place = slot.to(tl.int64) * VOCAB + at
        count = tl.load(in_output + place, mask=there, other=0)
        if DRAFTS:
            for before in range(0, depth):
                count += (at == tl.load(drafts - before)).to(tl.int32)
        seen = (count > 0) | (tl.load(in_prompt + place, mask=there, other=0).to(tl.int32) != 0)
        factor = float_of(records, slot, REPETITION).to(tl.float64)
        logits = tl.where(seen, tl.where(logits > 0, logits / factor, logits * factor), logits)
        logits -= float_of(records, slot, FREQUENCY).to(tl.float64) * count.to(tl.float64)
        logits -= float_of(records, slot, PRESENCE).to(tl.float64) * (count > 0).to(tl.float64)
    if features & MASKED:
        word = tl.load(masks + slot * ((VOCAB + 31) // 32) + at // 32, mask=there, other=0)
        logits = tl.where(((word >> (at % 32)) & 1) != 0, logits, float("-inf"))
    return logits


@triton.jit
def _range(
    logits, edited, row, first, is_edited, VOCAB: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest and the least finite logit of a chunk."""
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    low = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, CHUNK, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        left = logits_of(logits, edited, row, at, is_edited, VOCAB)
        peak = tl.maximum(peak, left)
        low = tl.minimum(low, tl.where(left > float("-inf"), left, float("inf")))
    return tl.max(peak, 0), tl.min(low, 0)


@triton.jit
def _edit(
    logits,
    edited,
    peaks,
    lows,
    records,
    row_slot,
    row_position,
    row_place,
    row_token,
    row_depth,
    bias_ids,
    bias_values,
    in_prompt,
    in_output,
    masks,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BIASES: tl.constexpr,
    BIASES_POWER: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(row_slot + row)
    features = int_of(records, slot, FEATURES)
    draws = tl.load(row_place + row) >= 0
    mine = row.to(tl.int64) * VOCAB
    first = chunk * CHUNK
    behind = tl.minimum(first + CHUNK, VOCAB)
    is_edited = (features & EDITED) != 0
    drafts = row_token + row
    depth = tl.load(row_depth + row) if DRAFTS else 0
    if draws & is_edited:
        for start in range(0, CHUNK, BLOCK):
            at = first + start + tl.arange(0, BLOCK)
            there = at < VOCAB
            raw = tl.load(logits + mine + at, mask=there, other=float("-inf")).to(tl.float64)
            left = _penalized(
                raw, at, there, slot, features, records, in_prompt, in_output, masks, drafts, depth,
                VOCAB, DRAFTS,
            )  # fmt: skip
            tl.store(edited + mine + at, left.to(tl.float32), mask=there)
        together()
        if features & BIASED:
            b = tl.arange(0, BIASES_POWER)
            some = b < BIASES
            at = tl.load(bias_ids + slot * BIASES + b, mask=some, other=0).to(tl.int32)
            bias = tl.load(bias_values + slot * BIASES + b, mask=some, other=0.0)
            # An unused place is id 0, value 0.
            there = (bias != 0) & (at >= first) & (at < behind)
            raw = tl.load(logits + mine + at, mask=there, other=0.0).to(tl.float64) + bias.to(tl.float64)
            left = _penalized(
                raw, at, there, slot, features, records, in_prompt, in_output, masks, drafts, depth,
                VOCAB, DRAFTS,
            )  # fmt: skip
            tl.store(edited + mine + at, left.to(tl.float32), mask=there)
            together()
        early = tl.load(row_position + row) + 1 < int_of(records, slot, STOPS_FROM)
        if ((features & HOLDS_STOPS) != 0) & early:
            stop = tl.load(records + slot * RECORD_WORDS + STOP_IDS + tl.arange(0, _STOPS))
            there = (stop >= first) & (stop < behind)
            nothing = tl.full([_STOPS], float("-inf"), tl.float32)
            tl.store(edited + mine + stop, nothing, mask=there)
            together()
    if draws & ((features & FILTERED) != 0):
        peak, low = _range(logits, edited, row, first, is_edited, VOCAB, CHUNK, BLOCK)
        place = row * tl.num_programs(1) + chunk
        tl.store(peaks + place, peak)
        tl.store(lows + place, low)


@dataclass(frozen=True, slots=True)
class EditInputs:
    """Logit edits that the slots' requests ask for: `bias_ids` [slots, n] int64 and `bias_values` float32,
    `in_prompt` [slots, V] bool, `in_output` int32, `masks` [slots, V / 32 rounded up] int32."""

    bias_ids: Tensor
    bias_values: Tensor
    in_prompt: Tensor
    in_output: Tensor
    masks: Tensor


def edit_logits(
    edited: Tensor,
    peaks: Tensor,
    lows: Tensor,
    logits: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    records: Tensor,
    inputs: EditInputs,
    chunk: int,
    drafts: tuple[Tensor, Tensor] | None = None,
) -> None:
    """logits [R, V] → edited [R, V] float32, only of rows whose requests edit; and for rows with filters,
    peaks and lows [R, chunks] float32, the largest and least finite number of each chunk.

    `rows`: slot, position and place of each, [R] int32; records [slots, 32] int32. `drafts`: token and depth
    of each row, [R] int32, where slots have several rows (`RowArrays`): to penalties the tokens of a slot's
    rows from depth 1 on are output. Raises ValueError where a slot's arrays are of another vocabulary.
    """
    vocab = logits.shape[1]
    if inputs.in_output.shape[1] != vocab or inputs.masks.shape[1] != -(-vocab // 32):
        raise ValueError(f"counts {tuple(inputs.in_output.shape)} are not of {vocab} tokens")
    biases = inputs.bias_ids.shape[1]
    _edit[(logits.shape[0], triton.cdiv(vocab, chunk))](
        logits,
        edited,
        peaks,
        lows,
        records,
        *rows,
        *(drafts or (rows[0], rows[0])),
        inputs.bias_ids,
        inputs.bias_values,
        inputs.in_prompt,
        inputs.in_output,
        inputs.masks,
        VOCAB=vocab,
        CHUNK=chunk,
        BLOCK=min(chunk, 2048),
        BIASES=biases,
        BIASES_POWER=triton.next_power_of_2(biases),
        DRAFTS=drafts is not None,
        num_warps=8,
    )
