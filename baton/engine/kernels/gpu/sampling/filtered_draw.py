"""The draw among what edits and filters have left: the largest of (logit / temperature + Gumbel noise).

As `sample_simple`, with the same noise; but noise is long code, so a program computes it only for those quads
of tokens that have one to keep, which it lists first; with top-k the search for the threshold has.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import together
from baton.engine.kernels.gpu.sampling.sample_simple import (
    NOWHERE,
    PURPOSE,
    best_of,
    first_peak,
    gumbel_noise,
)
from baton.engine.kernels.gpu.sampling.sampler_rows import (
    EDITED,
    FEATURES,
    FILTERED,
    TEMPERATURE,
    float_of,
    int_of,
    limits_of,
    logits_of,
    seed_of,
)
from baton.engine.kernels.gpu.sampling.thresholds import SearchSpace

_TILE = 256


@triton.jit
def _score(logits, edited, row, at, is_edited, cut, floor, temperature, word, VOCAB: tl.constexpr):
    x = logits_of(logits, edited, row, at, is_edited, VOCAB)
    scaled = x.to(tl.float64) / temperature
    return tl.where((x >= cut) & (scaled >= floor), scaled, float("-inf")) + gumbel_noise(word)


@triton.jit
def _list_quads(
    logits, edited, row, first, is_edited, cut, quads, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The quads of a chunk with a logit of `cut` or more → how many."""
    quad = first // 4 + tl.arange(0, CHUNK // 4)
    at = quad[:, None] * 4 + tl.arange(0, 4)[None, :]
    x = logits_of(logits, edited, row, at, is_edited, VOCAB)
    kept = tl.max(((x >= cut) & (at < VOCAB)).to(tl.int32), 1)
    behind = tl.cumsum(kept, 0)
    tl.store(quads + behind - 1, quad, mask=kept > 0)
    return tl.max(behind, 0)


@triton.jit
def _draw(
    logits, edited, cuts, floors, records, row_slot, row_position, row_place, quads, counts, best, best_at,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(row_slot + row)
    features = int_of(records, slot, FEATURES)
    is_edited = (features & EDITED) != 0
    temperature = float_of(records, slot, TEMPERATURE).to(tl.float64)
    place = row * CHUNKS + chunk
    draws = tl.load(row_place + row) >= 0
    if draws & (temperature > 0):
        is_filtered = (features & FILTERED) != 0
        cut = tl.load(cuts + row)
        floor = tl.load(floors + row)
        cut = tl.where(is_filtered, cut, float("-inf"))
        floor = tl.where(is_filtered, floor, float("-inf"))
        seed = seed_of(records, slot)
        position = tl.load(row_position + row) + 1
        mine = quads + place.to(tl.int64) * (CHUNK // 4)
        has_k, _ = limits_of(records, slot, row_place, row, VOCAB)
        count = tl.load(counts + place)
        if has_k == 0:
            count = _list_quads(logits, edited, row, chunk * CHUNK, is_edited, cut, mine, VOCAB, CHUNK)
            together()
        highest = tl.full((), float("-inf"), tl.float64)
        at = tl.full((), NOWHERE, tl.int32)
        for start in range(0, count, TILE):
            i = start + tl.arange(0, TILE)
            # A place behind the last stands for tokens beyond the vocabulary.
            quad = tl.load(mine + i, mask=i < count, other=(VOCAB + 3) // 4)
            zero = tl.zeros_like(quad)
            w0, w1, w2, w3 = tl.philox(seed, quad, zero + position, zero + PURPOSE, zero)
            s0 = _score(logits, edited, row, quad * 4, is_edited, cut, floor, temperature, w0, VOCAB)
            s1 = _score(logits, edited, row, quad * 4 + 1, is_edited, cut, floor, temperature, w1, VOCAB)
            s2 = _score(logits, edited, row, quad * 4 + 2, is_edited, cut, floor, temperature, w2, VOCAB)
            s3 = _score(logits, edited, row, quad * 4 + 3, is_edited, cut, floor, temperature, w3, VOCAB)
            peak, peak_at = first_peak(s0, s1, s2, s3, quad)
            at = tl.where(peak > highest, peak_at, at)
            highest = tl.maximum(highest, peak)
        tl.store(best + place, highest)
        tl.store(best_at + place, at)
    if draws & (temperature == 0):
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        x = logits_of(logits, edited, row, i, is_edited, VOCAB)
        peak = tl.max(x, 0)
        tl.store(best + place, peak.to(tl.float64))
        tl.store(best_at + place, tl.min(tl.where((x == peak) & (i < VOCAB), i, NOWHERE), 0))


@triton.jit
def _finalize(best, best_at, row_drawn, row_place, CHUNKS: tl.constexpr, POWER: tl.constexpr):
    row = tl.program_id(0)
    if tl.load(row_place + row) >= 0:
        tl.store(row_drawn + row, best_of(best, best_at, row, CHUNKS, POWER))


def draw_filtered(
    row_drawn: Tensor,
    logits: Tensor,
    edited: Tensor,
    space: SearchSpace,
    rows: tuple[Tensor, Tensor, Tensor],
    records: Tensor,
    places: tuple[Tensor, Tensor],
    chunk: int,
) -> None:
    """logits [R, V], edited, and what `find_thresholds` found → row_drawn [R] int32.

    `rows`: slot, position (of the token read) and place of each, [R] int32; records [slots, 32] int32;
    `places` as `sample_places` makes them. Raises ValueError where they are of another vocabulary.
    """
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, chunk)
    if places[0].shape[1] != chunks or places[0].shape[0] < count:
        raise ValueError(f"the places are {tuple(places[0].shape)}, the logits {tuple(logits.shape)}")
    _draw[(count, chunks)](
        logits, edited, space.cuts, space.floors, records, *rows, space.quads, space.counts, *places,
        VOCAB=vocab, CHUNK=chunk, CHUNKS=chunks, TILE=_TILE, num_warps=8,
    )  # fmt: skip
    _finalize[(count,)](
        *places, row_drawn, rows[2], CHUNKS=chunks, POWER=triton.next_power_of_2(chunks), num_warps=1
    )
