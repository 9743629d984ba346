"""Top-k and top-p without sorting: the least logit that a row's filters keep.

Both are one question, asked of the logits that top-n-sigma keeps (`sigma_cuts`): of all v, the least for
which the measure of what is above v stays under a target. For top-k the measure is a count and the target k;
for top-p alone it is probability mass and the target p of the whole.

    narrow    asks it in float32 at PIVOTS points between two bounds, TURNS times if need be
    gather    the logits that the bounds leave: the candidates
    weigh     for top-p alone, in float64: the mass above these, and of the whole
    search    searches among the candidates, exactly, by halving the order-preserving integers of float32;
              top-p over what top-k left is a second search among the same

    sums [R, chunks, PIVOTS]: measure of a chunk's logits above each pivot; pivot 0 is -inf: the whole
    bounds [R, 2]: of a row's threshold t, low < t <= high

Every sum has one order, whatever the batch. A mass at a pivot counts only where it misses the target by
more than float32 could be wrong.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.sampling.sampler_rows import (
    EDITED,
    FEATURES,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    float_of,
    int_of,
    key_of,
    limits_of,
    logits_of,
    value_of,
)
from baton.engine.kernels.gpu.sampling.sigma_cuts import find_sigma_cuts
from baton.engine.shared_memory.mailbox import field_offset

MIN_P = tl.constexpr(field_offset("min_p") // 4)
PIVOTS = 16
TURNS = 3
_PIVOTS = tl.constexpr(PIVOTS)
# Tolerance of a probability mass summed in float32, relative: several times its largest error.
_DOUBT = tl.constexpr(1e-4)
# Below exp(-40) of the likeliest a vocabulary's tokens together weigh less than any top_p < 1 leaves out.
_FAR = tl.constexpr(40.0)
# So few logits above the lower bound need no narrower one.
_FEW = tl.constexpr(1024)
# Candidates of each chunk that `search` holds at once.
_WIDTH = 128


@triton.jit
def _first_bounds(
    peaks, lows, sigma_cut, row, temperature, by_mass, CHUNKS: tl.constexpr, POWER: tl.constexpr
):
    c = tl.arange(0, POWER)
    peak = tl.max(tl.load(peaks + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf")), 0)
    low = tl.min(tl.load(lows + row * CHUNKS + c, mask=c < CHUNKS, other=float("inf")), 0)
    low = tl.maximum(tl.where(by_mass, tl.maximum(low, peak - _FAR * temperature), low), sigma_cut)
    return value_of(key_of(low) - 1), peak


@triton.jit
def _pivots(low, high, j):
    return tl.where(j > 0, low + (high - low) * (j.to(tl.float32) / _PIVOTS), float("-inf"))


@triton.jit
def _narrowed(low, high, sums, row, records, slot, by_mass, CHUNKS: tl.constexpr, POWER: tl.constexpr):
    """The bounds that the sums at the pivots between them leave, and the measure above the lower."""
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
    high = tl.minimum(high, tl.min(tl.where(under, pivot, float("inf")), 0))
    return low, high, tl.min(tl.where(over, measure, whole), 0)


@triton.jit
def _narrow(
    logits, edited, peaks, lows, sigma_cuts, bounds, sums, few, new_bounds, new_sums, new_few, records,
    row_slot, row_place, FIRST: tl.constexpr, VOCAB: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(row_slot + row)
    has_k, has_p = limits_of(records, slot, row_place, row, VOCAB)
    if has_k | has_p:
        by_mass = has_k == 0
        is_edited = (int_of(records, slot, FEATURES) & EDITED) != 0
        at = chunk * CHUNK + tl.arange(0, BLOCK)[None, :]
        # Each block is asked for before the one ahead of it is worked on.
        ahead = logits_of(logits, edited, row, at, is_edited, VOCAB)
        temperature = tl.maximum(float_of(records, slot, TEMPERATURE), 1e-30)
        sigma_cut = tl.load(sigma_cuts + row)
        low, peak = _first_bounds(peaks, lows, sigma_cut, row, temperature, by_mass, CHUNKS, POWER)
        high = peak
        enough = False
        if not FIRST:
            low, high = tl.load(bounds + row * 2), tl.load(bounds + row * 2 + 1)
            enough = tl.load(few + row) != 0
            if not enough:
                low, high, beyond = _narrowed(low, high, sums, row, records, slot, by_mass, CHUNKS, POWER)
                enough = has_k & (beyond <= _FEW)
        if chunk == 0:
            tl.store(new_bounds + row * 2, low)
            tl.store(new_bounds + row * 2 + 1, high)
            tl.store(new_few + row, enough)
        if not enough:
            per = 1 / temperature
            j = tl.arange(0, _PIVOTS)
            pivot = _pivots(low, high, j)[:, None]
            above = tl.zeros([_PIVOTS, BLOCK], tl.float32)
            for start in range(BLOCK, CHUNK + BLOCK, BLOCK):
                x = tl.where(ahead >= sigma_cut, ahead, float("-inf"))
                if start < CHUNK:
                    ahead = logits_of(logits, edited, row, at + start, is_edited, VOCAB)
                weight = tl.full([1, BLOCK], 1.0, tl.float32)
                if by_mass:
                    weight = tl.exp((x - peak) * per)
                above = tl.where(x > pivot, above + weight, above)
            tl.store(new_sums + (row * CHUNKS + chunk) * _PIVOTS + j, tl.sum(above, 1))


@triton.jit
def _gather(
    logits, edited, bounds, sums, few, new_bounds, candidates, quads, counts, records, row_slot, row_place,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Lists the quads of tokens that have a candidate: with top-k all above the lower bound, else those
    between both. counts [R, chunks]: how many; quads [R, chunks, CHUNK / 4] int32: which; candidates [R,
    chunks, CHUNK] float32: their logits, or -inf."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(row_slot + row)
    has_k, has_p = limits_of(records, slot, row_place, row, VOCAB)
    if has_k | has_p:
        is_edited = (int_of(records, slot, FEATURES) & EDITED) != 0
        low, high = tl.load(bounds + row * 2), tl.load(bounds + row * 2 + 1)
        if tl.load(few + row) == 0:
            low, high, _ = _narrowed(low, high, sums, row, records, slot, has_k == 0, CHUNKS, POWER)
        if chunk == 0:
            tl.store(new_bounds + row * 2, low)
            tl.store(new_bounds + row * 2 + 1, high)
        four = tl.arange(0, 4)[None, :]
        quad = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
        at = quad[:, None] * 4 + four
        x = logits_of(logits, edited, row, at, is_edited, VOCAB)
        between = (x > low) & ((x <= high) | has_k)
        some = tl.max(between.to(tl.int32), 1)
        behind = tl.cumsum(some, 0)
        place = row * CHUNKS + chunk
        mine = candidates + place.to(tl.int64) * CHUNK
        spot = mine + (behind - 1)[:, None] * 4 + four
        tl.store(spot, tl.where(between, x, float("-inf")), mask=(some > 0)[:, None] & (four >= 0))
        tl.store(quads + place.to(tl.int64) * (CHUNK // 4) + behind - 1, quad, mask=some > 0)
        tl.store(counts + place, tl.max(behind, 0))


@triton.jit
def _weigh(
    logits, edited, peaks, sigma_cuts, bounds, masses, records, row_slot, row_place,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    POWER: tl.constexpr,
):  # fmt: skip
    """masses [R, chunks, 2] float64: of a chunk, above the upper bound, and all."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(row_slot + row)
    has_k, has_p = limits_of(records, slot, row_place, row, VOCAB)
    if has_p & (has_k == 0):
        is_edited = (int_of(records, slot, FEATURES) & EDITED) != 0
        peak, per = _scale(peaks, row, records, slot, CHUNKS, POWER)
        high = tl.load(bounds + row * 2 + 1)
        sigma_cut = tl.load(sigma_cuts + row)
        above = tl.zeros([BLOCK], tl.float64)
        whole = tl.zeros([BLOCK], tl.float64)
        for start in range(0, CHUNK, BLOCK):
            at = chunk * CHUNK + start + tl.arange(0, BLOCK)
            x = logits_of(logits, edited, row, at, is_edited, VOCAB)
            weight = tl.where(x >= sigma_cut, tl.exp((x.to(tl.float64) - peak) * per), 0.0)
            whole += weight
            above += tl.where(x > high, weight, 0.0)
        place = masses + (row * CHUNKS + chunk) * 2
        tl.store(place, tl.sum(above, 0))
        tl.store(place + 1, tl.sum(whole, 0))


@triton.jit
def _scale(peaks, row, records, slot, CHUNKS: tl.constexpr, POWER: tl.constexpr):
    """A row's largest logit and the inverse of its temperature, float64."""
    c = tl.arange(0, POWER)
    peak = tl.max(tl.load(peaks + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf")), 0)
    return peak.to(tl.float64), 1.0 / float_of(records, slot, TEMPERATURE).to(tl.float64)


@triton.jit
def _tile(candidates, count, start, CHUNK: tl.constexpr, POWER: tl.constexpr, WIDTH: tl.constexpr):
    """[POWER, WIDTH] of a row's candidates, `count` [POWER] of each chunk; -inf where there are none."""
    j = start + tl.arange(0, WIDTH)
    place = candidates + tl.arange(0, POWER)[:, None] * CHUNK + j[None, :]
    return tl.load(place, mask=j[None, :] < count[:, None], other=float("-inf"))


@triton.jit
def _weights(x, peak, per, BY_MASS: tl.constexpr):
    if BY_MASS:
        weight = tl.exp((x.to(tl.float64) - peak) * per)
    else:
        weight = tl.where(x > float("-inf"), 1.0, 0.0).to(tl.float64)
    return weight


@triton.jit
def _beyond(
    candidates, count, most, held, held_weight, value, peak, per, BY_MASS: tl.constexpr,
    CHUNK: tl.constexpr, POWER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The measure of a row's candidates above `value`; of each chunk the first WIDTH are held."""
    total = tl.where(held > value, held_weight, 0.0)
    for start in range(WIDTH, most, WIDTH):
        x = _tile(candidates, count, start, CHUNK, POWER, WIDTH)
        total += tl.where(x > value, _weights(x, peak, per, BY_MASS), 0.0)
    return tl.sum(total)


@triton.jit
def _search(
    candidates, count, most, held, low, high, above, target, peak, per, BY_MASS: tl.constexpr,
    CHUNK: tl.constexpr, POWER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The least key in (low, high] beyond which `above` and the candidates stay under the target."""
    weight = _weights(held, peak, per, BY_MASS)
    while high - low > 1:
        middle = (low + high) >> 1
        value = value_of(middle.to(tl.int32))
        beyond = _beyond(
            candidates, count, most, held, weight, value, peak, per, BY_MASS, CHUNK, POWER, WIDTH
        )  # fmt: skip
        under = above + beyond < target
        high = tl.where(under, middle, high)
        low = tl.where(under, low, middle)
    return high


@triton.jit
def _search_candidates(
    peaks, sigma_cuts, bounds, candidates, counts, masses, cuts, floors, records, row_slot, row_place,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, POWER: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(row_slot + row)
    has_k, has_p = limits_of(records, slot, row_place, row, VOCAB)
    cut = tl.load(sigma_cuts + row)
    if has_k | has_p:
        peak, per = _scale(peaks, row, records, slot, CHUNKS, POWER)
        mine = candidates + row.to(tl.int64) * CHUNKS * CHUNK
        c = tl.arange(0, POWER)
        count = tl.load(counts + row * CHUNKS + c, mask=c < CHUNKS, other=0) * 4
        most = tl.max(count, 0)
        held = _tile(mine, count, 0, CHUNK, POWER, WIDTH)
        low = key_of(tl.load(bounds + row * 2)).to(tl.int64)
        high = key_of(tl.load(bounds + row * 2 + 1)).to(tl.int64)
        key = high
        above = tl.full((), 0.0, tl.float64)
        whole = above
        if has_k:
            k = int_of(records, slot, TOP_K).to(tl.float64)
            key = _search(
                mine, count, most, held, low, high, above, k, peak, per, False, CHUNK, POWER, WIDTH
            )  # fmt: skip
            low = key - 1
            high = key_of(peak.to(tl.float32)).to(tl.int64)
            if has_p:
                below = value_of(low.to(tl.int32))
                weight = _weights(held, peak, per, True)
                whole = _beyond(
                    mine, count, most, held, weight, below, peak, per, True, CHUNK, POWER, WIDTH
                )  # fmt: skip
        else:
            place = masses + (row * CHUNKS + c) * 2
            above = tl.sum(tl.load(place, mask=c < CHUNKS, other=0.0), 0)
            whole = tl.sum(tl.load(place + 1, mask=c < CHUNKS, other=0.0), 0)
        if has_p:
            share = float_of(records, slot, TOP_P).to(tl.float64) * whole
            key = _search(
                mine, count, most, held, low, high, above, share, peak, per, True, CHUNK, POWER, WIDTH
            )  # fmt: skip
        cut = value_of(key.to(tl.int32))
    floor = tl.full((), float("-inf"), tl.float64)
    min_p = float_of(records, slot, MIN_P).to(tl.float64)
    if (min_p > 0) & (float_of(records, slot, TEMPERATURE) > 0):
        peak, per = _scale(peaks, row, records, slot, CHUNKS, POWER)
        temperature = float_of(records, slot, TEMPERATURE).to(tl.float64)
        floor = peak / temperature + tl.log(min_p)
        # What is under it in float32 by more than rounding is under it in float64.
        cut = tl.maximum(cut, value_of(key_of((floor * temperature).to(tl.float32)) - 1))
    tl.store(cuts + row, cut)
    tl.store(floors + row, floor)


class SearchSpace:
    """Scratch and results of a threshold search, for up to R rows: it finds `cuts` [R] float32, the least
    logit kept, and `floors` [R] float64, the least (logit / temperature) that min-p keeps. For rows with
    top-k, `quads` and `counts` list wherever a token was kept."""

    def __init__(self, rows: int, vocab: int, chunk: int, device: torch.device) -> None:
        chunks = triton.cdiv(vocab, chunk)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.bounds = zeros(TURNS + 1, rows, 2)
        self.sums = zeros(TURNS, rows, chunks, PIVOTS)
        self.few = zeros(TURNS, rows, dtype=torch.int32)
        self.candidates = zeros(rows, chunks, chunk)
        self.quads = zeros(rows, chunks, chunk // 4, dtype=torch.int32)
        self.counts = zeros(rows, chunks, dtype=torch.int32)
        self.masses = zeros(rows, chunks, 2, dtype=torch.float64)
        self.sigma_cuts = zeros(rows)
        self.cuts = zeros(rows)
        self.floors = zeros(rows, dtype=torch.float64)


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
    bounds, sums, few, sigma_cuts = space.bounds, space.sums, space.few, space.sigma_cuts
    find_sigma_cuts(sigma_cuts, logits, edited, peaks, rows, records)
    for turn in range(TURNS):
        before = max(turn - 1, 0)
        _narrow[grid](
            logits, edited, peaks, lows, sigma_cuts, bounds[before], sums[before], few[before], bounds[turn],
            sums[turn], few[turn], records, *rows,
            FIRST=turn == 0, BLOCK=min(chunk, 512), num_warps=8, **sizes,
        )  # fmt: skip
    _gather[grid](
        logits, edited, bounds[TURNS - 1], sums[TURNS - 1], few[TURNS - 1], bounds[TURNS],
        space.candidates, space.quads, space.counts, records, *rows, num_warps=8, **sizes,
    )  # fmt: skip
    _weigh[grid](
        logits, edited, peaks, sigma_cuts, bounds[TURNS], space.masses, records, *rows,
        BLOCK=min(chunk, 1024), num_warps=8, **sizes,
    )  # fmt: skip
    _search_candidates[(count,)](
        peaks, sigma_cuts, bounds[TURNS], space.candidates, space.counts, space.masses, space.cuts,
        space.floors, records, *rows, WIDTH=_WIDTH, num_warps=8, **sizes,
    )  # fmt: skip
