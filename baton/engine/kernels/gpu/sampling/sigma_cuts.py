"""Top-n-sigma: the least logit that is at most n standard deviations below a row's largest.

Tang et al., "Top-nσ: Not All Logits Are You Need" (arXiv 2411.07641). As in llama.cpp, the standard deviation
is that of all logits that are not -inf, after edits and before any other filter. A program a row reads it
once, in float64 and in one order whatever the batch; the numbers are distances from the largest logit, so
that their squares lose no digits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.sampling.sampler_rows import (
    EDITED,
    FEATURES,
    FILTERED,
    float_of,
    int_of,
    key_of,
    logits_of,
    value_of,
)
from baton.engine.shared_memory.mailbox import field_offset

TOP_N_SIGMA = tl.constexpr(field_offset("top_n_sigma") // 4)
_BLOCK = 4096


@triton.jit
def _deviation(logits, edited, row, is_edited, largest, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The standard deviation of a row's logits, float64."""
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    count = tl.zeros([BLOCK], tl.float64)
    for start in range(0, VOCAB, BLOCK):
        x = logits_of(logits, edited, row, start + tl.arange(0, BLOCK), is_edited, VOCAB)
        there = x > float("-inf")
        below = tl.where(there, x.to(tl.float64) - largest, 0.0)
        total += below
        squares += below * below
        count += there.to(tl.float64)
    number = tl.maximum(tl.sum(count, 0), 1.0)
    mean = tl.sum(total, 0) / number
    return tl.sqrt(tl.maximum(tl.sum(squares, 0) / number - mean * mean, 0.0))


@triton.jit
def _find_cut(
    logits, edited, peaks, cuts, records, row_slot, row_place, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(row_slot + row)
    features = int_of(records, slot, FEATURES)
    deviations = float_of(records, slot, TOP_N_SIGMA).to(tl.float64)
    cut = tl.full((), float("-inf"), tl.float32)
    if (tl.load(row_place + row) >= 0) & ((features & FILTERED) != 0) & (deviations > 0):
        c = tl.arange(0, POWER)
        peak = tl.max(tl.load(peaks + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf")), 0)
        largest = peak.to(tl.float64)
        is_edited = (features & EDITED) != 0
        least = largest - deviations * _deviation(logits, edited, row, is_edited, largest, VOCAB, BLOCK)
        # The least float32 that is not below it.
        cut = least.to(tl.float32)
        cut = tl.where(cut.to(tl.float64) < least, value_of(key_of(cut) + 1), cut)
    tl.store(cuts + row, cut)


def find_sigma_cuts(
    cuts: Tensor,
    logits: Tensor,
    edited: Tensor,
    peaks: Tensor,
    rows: tuple[Tensor, Tensor],
    records: Tensor,
) -> None:
    """logits [R, V], edited and peaks as `edit_logits` left them → cuts [R] float32, -inf where all are kept.

    `rows`: slot and place of each, [R] int32; records [slots, 32] int32.
    """
    count, vocab = logits.shape
    chunks = peaks.shape[1]
    _find_cut[(count,)](
        logits, edited, peaks, cuts, records, *rows, VOCAB=vocab, BLOCK=_BLOCK, CHUNKS=chunks,
        POWER=triton.next_power_of_2(chunks), num_warps=16,
    )  # fmt: skip
