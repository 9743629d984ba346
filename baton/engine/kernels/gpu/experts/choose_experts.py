"""Steps that the kernels of the router share: the best experts of rows, and the tiles of their entries."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.device.ptx import together


@triton.jit
def gather_entries(
    tile_expert, tile_entry, tile_count, row, there, numbers, takes, EXPERTS_POWER: tl.constexpr,
    TOP_K: tl.constexpr, TOP_K_POWER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tiles of all entries, one for each expert that is taken, as `align_rows` makes them. `numbers`: the
    experts of each row [BM, TOP_K_POWER]; `takes` [BM, EXPERTS_POWER]: 1 where a row takes an expert."""
    expert = tl.arange(0, EXPERTS_POWER)
    taken = (tl.sum(takes, 0) > 0).to(tl.int32)
    tile = tl.cumsum(taken, 0) - taken
    used = tl.sum(taken, 0)
    for start in range(0, tile_count, EXPERTS_POWER):
        number = start + expert
        tl.store(tile_expert + number, -1, mask=(number >= used) & (number < tile_count))
    entries = (tile * TILE)[:, None] + tl.arange(0, TILE)[None, :]
    tl.store(tile_entry + entries, tl.full(entries.shape, -1, tl.int32), mask=(taken > 0)[:, None])
    tl.store(tile_expert + tile, expert, mask=taken > 0)
    together()
    places = tl.cumsum(takes, 0) - takes + (tile * TILE)[None, :]
    place = tl.arange(0, TOP_K_POWER)[None, :]
    for turn in tl.static_range(TOP_K):
        number = tl.max(tl.where(place == turn, numbers, -1), 1)[:, None]
        at = tl.sum(tl.where(expert[None, :] == number, places, 0), 1)
        tl.store(tile_entry + at, row * TOP_K + turn, mask=there)


@triton.jit
def choose_experts(
    logits, ids, weights, counts, taken_in_all, row, there, rows,
    EXPERTS: tl.constexpr, EXPERTS_POWER: tl.constexpr, TOP_K: tl.constexpr, TOP_K_POWER: tl.constexpr,
    NORMALISE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Softmax over a tile's logits, the best of each row, and -1 for rows that are not there. `counts`: of
    the tile, how many of its rows take each expert; they are added to `taken_in_all`. Returns the experts of
    each row [BM, TOP_K_POWER], and 1 where a row takes an expert [BM, EXPERTS_POWER]."""
    expert = tl.arange(0, EXPERTS_POWER)[None, :]
    place = tl.arange(0, TOP_K_POWER)[None, :]
    at = logits + row.to(tl.int64)[:, None] * EXPERTS + expert
    known = there[:, None] & (expert < EXPERTS)
    # Past the first-level cache: other multiprocessors have written them.
    found = tl.load(at, mask=known, other=float("-inf"), cache_modifier=".cg")
    found = tl.where(there[:, None], found, 0.0)
    shares = tl.exp(found - tl.max(found, 1)[:, None])
    shares = shares / tl.sum(shares, 1)[:, None]
    # A row that is no number takes experts too, of equal shares.
    shares = tl.where(shares == shares, shares, 0.0)
    # A share, which is no less than 0, has the order of its bits; of equal ones the lower expert is taken.
    keys = (shares.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (EXPERTS_POWER - 1 - expert)
    keys = tl.where(expert < EXPERTS, keys, -1)
    taken = tl.zeros((BM, TOP_K_POWER), tl.float32)
    numbers = tl.full((BM, TOP_K_POWER), -1, tl.int32)
    takes = tl.zeros((BM, EXPERTS_POWER), tl.int32)
    for turn in tl.static_range(TOP_K):
        best = tl.max(keys, 1)[:, None]
        number = EXPERTS_POWER - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        share = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        taken = tl.where(place == turn, share, taken)
        numbers = tl.where(place == turn, number, numbers)
        keys = tl.where(expert == number, -1, keys)
        takes = tl.where(there[:, None] & (expert == number), 1, takes)
    each = tl.arange(0, EXPERTS_POWER)
    count = tl.sum(takes, 0)
    tl.store(counts + each, count, mask=each < EXPERTS)
    tl.atomic_add(taken_in_all + each, count.to(tl.int64), mask=(each < EXPERTS) & (count > 0), sem="relaxed")
    if NORMALISE:
        taken = taken / tl.sum(taken, 1)[:, None]
    at = row.to(tl.int64)[:, None] * TOP_K + place
    stored = (row < rows)[:, None] & (place < TOP_K)
    tl.store(ids + at, tl.where(there[:, None], numbers, -1), mask=stored)
    tl.store(weights + at, taken, mask=stored & there[:, None])
    return numbers, takes
