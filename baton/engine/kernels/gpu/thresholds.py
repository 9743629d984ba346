"""Top-k and top-p without sorting: the least logit that a row's filters keep.

Both are one question: of all v, the least for which the measure of what is above v stays under a target.
For top-k the measure is a count and the target k; for top-p alone it is probability mass and the target p
of the whole. `narrow` asks it in float32 at PIVOTS points between two bounds, all chunks of a row at once,
and `gather` at last in between; it leaves the few logits that lie between the bounds, and the mass above
them in float64. `settle` searches among these, exactly: by halving the order-preserving integers of
float32. Top-p over what top-k left is a second search among the same.

    sums [R, chunks, PIVOTS]: measure of a chunk's logits above each pivot; pivot 0 is -inf: the whole
    bounds [R, 2]: of a row's threshold t, low < t <= high

Every sum has one order, whatever the batch. A mass at a pivot counts only where it misses the target by
more than float32 could be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.sampler_rows import (
    EDITED,
    FEATURES,
    FILTERED,
    MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    float_of,
    int_of,
    key_of,
    logits_of,
    value_of,
)

PIVOTS = 16
_PIVOTS = tl.constexpr(PIVOTS)
# Of a mass summed in float32, relative: several times what it can be wrong by.
_DOUBT = tl.constexpr(1e-4)
# Below exp(-40) of the likeliest a vocabulary's tokens together weigh less than any top_p < 1 leaves out.
_FAR = tl.constexpr(40.0)
_WIDTH = 128


@triton.jit
def _asks(records, slot, row_place, row, VOCAB: tl.constexpr):
    """Whether a row has top-k, and whether top-p; neither where it draws nothing."""
    draws = (tl.load(row_place + row) >= 0) & ((int_of(records, slot, FEATURES) & FILTERED) != 0)
    top_k = int_of(records, slot, TOP_K)
    return draws & (top_k > 0) & (top_k < VOCAB), draws & (float_of(records, slot, TOP_P) < 1)


@triton.jit
def _first_bounds(peaks, lows, row, temperature, by_mass, CHUNKS: tl.constexpr, POWER: tl.constexpr):
    c = tl.arange(0, POWER)
    peak = tl.max(tl.load(peaks + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf")), 0)
    low = tl.min(tl.load(lows + row * CHUNKS + c, mask=c < CHUNKS, other=float("inf")), 0)
    low = tl.where(by_mass, tl.maximum(low, peak - _FAR * temperature), low)
    return value_of(key_of(low) - 1), peak


@triton.jit
def _pivots(low, high, j):
    return tl.where(j > 0, low + (high - low) * (j.to(tl.float32) / _PIVOTS), float("-inf"))


@triton.jit
def _narrowed(
    low, high, sums, row, records, slot, by_mass, CHUNKS: tl.constexpr, POWER: tl.constexpr
):  # fmt: skip
    """The bounds that the sums at the pivots between them leave."""
    j = tl.arange(0, _PIVOTS)
    c = tl.arange(0, POWER)
    place = sums + (row * CHUNKS + c[:, None]) * _PIVOTS + j[None, :]
    measure = tl.sum(tl.load(place, mask=(c < CHUNKS)[:, None] & (j >= 0)[None, :], other=0.0), 0)
    whole = tl.sum(tl.where(j == 0, measure, 0.0), 0)
    share = float_of(records, slot, TOP_P) * whole
    target = tl.where(by_mass, share, int_of(records, slot, TOP_K).to(tl.float32))
    pivot = _pivots(low, high, j)
    under = (j > 0) & (measure < target * (1 - _DOUBT))
    over = (j > 0) & (measure >= target * (1 + _DOUBT))
    low = tl.maximum(low, tl.max(tl.where(over, pivot, float("-inf")), 0))
    return low, tl.minimum(high, tl.min(tl.where(under, pivot, float("inf")), 0))


@triton.jit
def _narrow(
    logits, edited, peaks, lows, bounds, sums, new_bounds, new_sums, records, row_slot, row_place,
    FIRST: tl.constexpr, VOCAB: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(row_slot + row)
    has_k, has_p = _asks(records, slot, row_place, row, VOCAB)
    if has_k | has_p:
        by_mass = has_k == 0
        is_edited = (int_of(records, slot, FEATURES) & EDITED) != 0
        temperature = tl.maximum(float_of(records, slot, TEMPERATURE), 1e-30)
        low, peak = _first_bounds(peaks, lows, row, temperature, by_mass, CHUNKS, POWER)
        high = peak
        if not FIRST:
            low, high = tl.load(bounds + row * 2), tl.load(bounds + row * 2 + 1)
            low, high = _narrowed(low, high, sums, row, records, slot, by_mass, CHUNKS, POWER)
        if chunk == 0:
            tl.store(new_bounds + row * 2, low)
            tl.store(new_bounds + row * 2 + 1, high)
        j = tl.arange(0, _PIVOTS)
        pivot = _pivots(low, high, j)[:, None]
        above = tl.zeros([_PIVOTS, BLOCK], tl.float32)
        for start in range(0, CHUNK, BLOCK):
            at = chunk * CHUNK + start + tl.arange(0, BLOCK)[None, :]
            x = logits_of(logits, edited, row, at, is_edited, VOCAB)
            weight = tl.where(by_mass, tl.exp((x - peak) / temperature), 1.0)
            above += tl.where(x > pivot, weight, 0.0)
        tl.store(new_sums + (row * CHUNKS + chunk) * _PIVOTS + j, tl.sum(above, 1))


@triton.jit
def _gather(
    logits, edited, peaks, bounds, sums, new_bounds, candidates, counts, masses, records, row_slot,
    row_place, VOCAB: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    POWER: tl.constexpr,
):  # fmt: skip
    """candidates [R, chunks, CHUNK] float32: `counts` of each chunk. With top-k everything above the lower
    bound; else what is between both, and masses [R, chunks, 2] float64: above them, and of the whole."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(row_slot + row)
    has_k, has_p = _asks(records, slot, row_place, row, VOCAB)
    if has_k | has_p:
        by_mass = has_k == 0
        is_edited = (int_of(records, slot, FEATURES) & EDITED) != 0
        temperature = float_of(records, slot, TEMPERATURE).to(tl.float64)
        c = tl.arange(0, POWER)
        peak = tl.max(tl.load(peaks + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf")), 0)
        low, high = tl.load(bounds + row * 2), tl.load(bounds + row * 2 + 1)
        low, high = _narrowed(low, high, sums, row, records, slot, by_mass, CHUNKS, POWER)
        high = tl.where(by_mass, high, peak)
        if chunk == 0:
            tl.store(new_bounds + row * 2, low)
            tl.store(new_bounds + row * 2 + 1, high)
        place = row * CHUNKS + chunk
        mine = candidates + place.to(tl.int64) * CHUNK
        above = tl.zeros([BLOCK], tl.float64)
        whole = tl.zeros([BLOCK], tl.float64)
        count = 0
        for start in range(0, CHUNK, BLOCK):
            at = chunk * CHUNK + start + tl.arange(0, BLOCK)
            x = logits_of(logits, edited, row, at, is_edited, VOCAB)
            between = (x > low) & (x <= high)
            behind = tl.cumsum(between.to(tl.int32), 0)
            tl.store(mine + count + behind - 1, x, mask=between)
            count += tl.max(behind, 0)
            if by_mass:
                weight = tl.exp((x.to(tl.float64) - peak.to(tl.float64)) / temperature)
                whole += weight
                above += tl.where(x > high, weight, 0.0)
        tl.store(counts + place, count)
        tl.store(masses + place * 2, tl.sum(above, 0))
        tl.store(masses + place * 2 + 1, tl.sum(whole, 0))


@triton.jit
def _measure(
    candidates, count, most, value, peak, temperature, BY_MASS: tl.constexpr, CHUNK: tl.constexpr,
    POWER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of a row's candidates above `value`: how many, or their mass; `count` [chunks] of each chunk."""
    c = tl.arange(0, POWER)
    total = tl.zeros([POWER, WIDTH], tl.float64)
    for start in range(0, most, WIDTH):
        j = start + tl.arange(0, WIDTH)
        there = j[None, :] < count[:, None]
        x = tl.load(candidates + c[:, None] * CHUNK + j[None, :], mask=there, other=float("-inf"))
        if BY_MASS:
            weight = tl.exp((x.to(tl.float64) - peak.to(tl.float64)) / temperature)
        else:
            weight = tl.full([POWER, WIDTH], 1.0, tl.float64)
        total += tl.where(x > value, weight, 0.0)
    return tl.sum(tl.sum(total, 1), 0)


@triton.jit
def _search(
    candidates, count, most, low, high, above, target, peak, temperature, BY_MASS: tl.constexpr,
    CHUNK: tl.constexpr, POWER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The least key in (low, high] with measure above + (of candidates beyond it) under the target."""
    while high - low > 1:
        middle = (low + high) >> 1
        value = value_of(middle.to(tl.int32))
        beyond = _measure(
            candidates, count, most, value, peak, temperature, BY_MASS, CHUNK, POWER, WIDTH
        )  # fmt: skip
        under = above + beyond < target
        high = tl.where(under, middle, high)
        low = tl.where(under, low, middle)
    return high


@triton.jit
def _settle(
    peaks, bounds, candidates, counts, masses, cuts, floors, records, row_slot, row_place,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, POWER: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(row_slot + row)
    has_k, has_p = _asks(records, slot, row_place, row, VOCAB)
    c = tl.arange(0, POWER)
    peak = tl.max(tl.load(peaks + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf")), 0)
    temperature = float_of(records, slot, TEMPERATURE).to(tl.float64)
    cut = tl.full((), float("-inf"), tl.float32)
    if has_k | has_p:
        mine = candidates + row.to(tl.int64) * CHUNKS * CHUNK
        count = tl.load(counts + row * CHUNKS + c, mask=c < CHUNKS, other=0)
        most = tl.max(count, 0)
        low = key_of(tl.load(bounds + row * 2)).to(tl.int64)
        high = key_of(tl.load(bounds + row * 2 + 1)).to(tl.int64)
        place = masses + (row * CHUNKS + c) * 2
        above = tl.sum(tl.load(place, mask=c < CHUNKS, other=0.0), 0)
        whole = tl.sum(tl.load(place + 1, mask=c < CHUNKS, other=0.0), 0)
        key = low
        if has_k:
            wanted = int_of(records, slot, TOP_K).to(tl.float64)
            key = _search(
                mine, count, most, low, high, 0.0, wanted, peak, temperature, False, CHUNK, POWER, WIDTH
            )  # fmt: skip
            below = value_of((key - 1).to(tl.int32))
            whole = _measure(mine, count, most, below, peak, temperature, True, CHUNK, POWER, WIDTH)
            low = key - 1
        if has_p:
            share = float_of(records, slot, TOP_P).to(tl.float64) * whole
            key = _search(
                mine, count, most, low, high, above, share, peak, temperature, True, CHUNK, POWER, WIDTH
            )  # fmt: skip
        cut = value_of(key.to(tl.int32))
    floor = tl.full((), float("-inf"), tl.float64)
    min_p = float_of(records, slot, MIN_P).to(tl.float64)
    if min_p > 0:
        floor = peak.to(tl.float64) / temperature + tl.log(min_p)
        # What is under it in float32 by more than rounding is under it in float64.
        cut = tl.maximum(cut, value_of(key_of((floor * temperature).to(tl.float32)) - 1))
    tl.store(cuts + row, cut)
    tl.store(floors + row, floor)


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What a search leaves between its kernels, for up to R rows, and what it finds: `cuts` [R] float32,
    the least logit kept, and `floors` [R] float64, the least (logit / temperature) that min-p keeps."""

    bounds: Tensor
    sums: Tensor
    candidates: Tensor
    counts: Tensor
    masses: Tensor
    cuts: Tensor
    floors: Tensor

    @classmethod
    def empty(cls, rows: int, vocab: int, chunk: int, device: torch.device) -> SearchSpace:
        chunks = triton.cdiv(vocab, chunk)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            bounds=zeros(3, rows, 2),
            sums=zeros(2, rows, chunks, PIVOTS),
            candidates=zeros(rows, chunks, chunk),
            counts=zeros(rows, chunks, dtype=torch.int32),
            masses=zeros(rows, chunks, 2, dtype=torch.float64),
            cuts=zeros(rows),
            floors=zeros(rows, dtype=torch.float64),
        )


def find_thresholds(
    space: SearchSpace,
    logits: Tensor,
    edited: Tensor,
    peaks: Tensor,
    lows: Tensor,
    rows: tuple[Tensor, Tensor],
    records: Tensor,
    chunk: int,
) -> None:
    """logits [R, V], edited, peaks and lows as `edit_logits` left them → cuts and floors in `space`.

    `rows`: slot and place of each, [R] int32; records [slots, 32] int32. Raises ValueError where the space
    is of another vocabulary.
    """
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, chunk)
    if tuple(space.candidates.shape[1:]) != (chunks, chunk) or space.candidates.shape[0] < count:
        raise ValueError(f"the space is {tuple(space.candidates.shape)}, the logits {tuple(logits.shape)}")
    sizes = {"CHUNK": chunk, "CHUNKS": chunks, "POWER": triton.next_power_of_2(chunks), "VOCAB": vocab}
    grid = count, chunks
    for turn in (0, 1):
        _narrow[grid](
            logits, edited, peaks, lows, space.bounds[0], space.sums[0], space.bounds[turn],
            space.sums[turn], records, *rows, FIRST=turn == 0, BLOCK=min(chunk, 1024), num_warps=8, **sizes,
        )  # fmt: skip
    _gather[grid](
        logits, edited, peaks, space.bounds[1], space.sums[1], space.bounds[2], space.candidates,
        space.counts, space.masses, records, *rows, BLOCK=min(chunk, 2048), num_warps=8, **sizes,
    )  # fmt: skip
    _settle[(count,)](
        peaks, space.bounds[2], space.candidates, space.counts, space.masses, space.cuts, space.floors,
        records, *rows, WIDTH=_WIDTH, num_warps=8, **sizes,
    )  # fmt: skip
