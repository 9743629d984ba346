"""Causal attention of packed rows over the paged KV cache, with grouped heads and a sliding window.

    out = softmax(q · Kᵀ · scale) · V      over the keys at positions (p - window, p] of the row's sequence

Everything is computed in tiles of fixed size: QUERY_TILE rows of one sequence against KV_TILE tokens that
start at a multiple of KV_TILE, whatever the block size. All products have one shape, and sums over a
context go tile by tile from the left. A tile that a row does not see adds exact zeros, so a row's result
does not depend on chunking, on its neighbours, or on how the cache is cut into blocks.

Softmax is float32 for every dtype, as in the models' code; the products are float64 for float64, else
float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.reference.cache_write import (
    flat_rows,
    flat_scales,
    head_offsets,
    plane_offset,
    token_rows,
)
from baton.engine.kernels.reference.kv_codes import restore
from baton.engine.kernels.reference.linear import pad_inner

QUERY_TILE = 4
KV_TILE = 64
# Partial sums of a softmax.
LANES = 16
# Bounds the temporary memory of one pass: (query tile, KV tile) pairs computed together.
MAX_TILE_PAIRS = 512


@dataclass(frozen=True, slots=True)
class TileBatch:
    """T query tiles computed in one go, each against J KV tiles.

    `query_rows` [T, QUERY_TILE]: packed rows; a tile that is not full repeats its first row.
    `cache_rows` [T, J · KV_TILE]: where the tokens are, see `token_rows`. A token the tile's rows do not see
    is replaced by one of their own, so nothing of another sequence is ever read.
    `visible` [T, J, QUERY_TILE, KV_TILE] bool: row sees token.
    """

    query_rows: Tensor
    cache_rows: Tensor
    visible: Tensor


@dataclass(frozen=True, slots=True)
class _QueryTile:
    sequence: int
    rows: tuple[int, ...]
    # Positions of the first and last token that any row sees.
    first: int
    last: int

    @property
    def kv_tiles(self) -> int:
        return self.last // KV_TILE - self.first // KV_TILE + 1


def plan_attention(
    query_start: Sequence[int], positions: Tensor, block_table: Tensor, group: Tensor, window: int | None
) -> list[TileBatch]:
    """Plans how one forward pass attends in every layer of a cache group.

    Sequence b owns rows query_start[b]:query_start[b+1] of positions [N] int64 and row b of block_table
    [B, max blocks] int64; `group` is the cache group's tensor, `window` the tokens a row sees, or None.
    """
    host_positions = positions.tolist()
    tiles = sorted(_query_tiles(query_start, host_positions, window), key=lambda tile: tile.kv_tiles)
    batches: list[list[_QueryTile]] = []
    for tile in tiles:
        # Sorted, so this tile's count is the largest so far and sets the batch's width.
        if not batches or (len(batches[-1]) + 1) * tile.kv_tiles > MAX_TILE_PAIRS:
            batches.append([])
        batches[-1].append(tile)
    return [_tile_batch(batch, positions, block_table, group, window) for batch in batches]


def _query_tiles(
    query_start: Sequence[int], positions: list[int], window: int | None
) -> Iterator[_QueryTile]:
    for sequence, (start, end) in enumerate(itertools.pairwise(query_start)):
        for row in range(start, end, QUERY_TILE):
            rows = tuple(range(row, min(row + QUERY_TILE, end)))
            seen = [positions[r] for r in rows]
            first = 0 if window is None else max(0, min(seen) - window + 1)
            yield _QueryTile(sequence, rows + rows[:1] * (QUERY_TILE - len(rows)), first, max(seen))


def _tile_batch(
    tiles: list[_QueryTile], positions: Tensor, block_table: Tensor, group: Tensor, window: int | None
) -> TileBatch:
    device = positions.device

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)[:, None]

    width = max(tile.kv_tiles for tile in tiles) * KV_TILE
    first, last = column([tile.first for tile in tiles]), column([tile.last for tile in tiles])
    tokens = first // KV_TILE * KV_TILE + torch.arange(width, device=device)
    tables = block_table[column([tile.sequence for tile in tiles])[:, 0]]
    query_rows = torch.tensor([tile.rows for tile in tiles], dtype=torch.int64, device=device)
    ends = positions[query_rows][:, :, None]
    visible = tokens[:, None] <= ends
    if window is not None:
        visible &= tokens[:, None] > ends - window
    visible = visible.view(len(tiles), QUERY_TILE, -1, KV_TILE).transpose(1, 2)
    return TileBatch(query_rows, token_rows(group, tables, tokens.clamp(first, last)), visible)


def paged_attention(
    query: Tensor,
    group: Tensor,
    layer: int,
    plan: list[TileBatch],
    scale: float,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """query [N, heads, D] → [N, heads, D] in its dtype; rows that no sequence owns come out as zeros.

    `group` is the cache group's tensor, whose dtype is the query's; or codes, with their scales `kv_scales`
    (`KVCache.scales`), which are restored in the dtype of the products, so without rounding. `layer` counts
    within the group.
    """
    out = torch.zeros_like(query)
    for batch in plan:
        attn_out = _attend(query, group, kv_scales, layer, batch, scale)
        # A repeated row has the same result wherever it stands: writing it twice is harmless.
        out.index_copy_(0, batch.query_rows.view(-1), attn_out.to(out.dtype))
    return out


def _attend(
    query: Tensor, group: Tensor, kv_scales: Tensor | None, layer: int, batch: TileBatch, scale: float
) -> Tensor:
    """→ [T · QUERY_TILE, heads, D], in the dtype of the products."""
    tiles, steps = batch.query_rows.shape[0], batch.visible.shape[1]
    kv_heads = group.shape[3]
    grouped = query.shape[1] // kv_heads
    wide = torch.promote_types(query.dtype, torch.float32)
    height = QUERY_TILE * grouped

    q = pad_inner(query)[batch.query_rows].to(wide)
    dim = q.shape[-1]
    q = q.view(tiles, QUERY_TILE, kv_heads, grouped, dim)
    q = q.permute(0, 2, 1, 3, 4).reshape(tiles, kv_heads, 1, height, dim)
    q = q.expand(tiles, kv_heads, steps, height, dim).reshape(-1, height, dim)
    keys, values = (
        pad_inner(_gather(group, kv_scales, layer, plane, batch.cache_rows, wide)) for plane in (0, 1)
    )

    scores = torch.bmm(q, keys.transpose(1, 2)).mul_(scale).float()
    scores = scores.view(tiles, kv_heads, steps, QUERY_TILE, grouped, KV_TILE)
    scores = scores.masked_fill_(~batch.visible[:, None, :, :, None], -torch.inf)
    scores = scores.view(tiles, kv_heads, steps, height, KV_TILE).transpose(2, 3)
    weights = tiled_softmax(scores.reshape(tiles, kv_heads, height, steps * KV_TILE)).to(wide)
    weights = weights.view(tiles, kv_heads, height, steps, KV_TILE).transpose(2, 3)

    products = torch.bmm(weights.reshape(-1, height, KV_TILE), values)
    products = products.view(tiles, kv_heads, steps, height, dim)
    total = products[:, :, 0].clone()
    for step in range(1, steps):
        total += products[:, :, step]
    total = total.view(tiles, kv_heads, QUERY_TILE, grouped, dim).permute(0, 2, 1, 3, 4)
    return total.reshape(tiles * QUERY_TILE, kv_heads * grouped, dim)[..., : query.shape[-1]]


def tiled_softmax(scores: Tensor) -> Tensor:
    """scores [..., L] float32 with -inf where masked, L a multiple of 64, one score a row finite → [..., L].

    Tiles of 64 that are masked throughout, before or behind, leave a row's other results bitwise as they
    are. On a CPU torch's own softmax has this property (tested): it adds in interleaved partial sums from
    the left. The models' reference code calls it too, and agreeing with it to the last bit is what lets
    float64 tokens be equal. Elsewhere torch's order of additions may depend on L: `softmax_in_lanes`.
    """
    return scores.softmax(-1) if scores.device.type == "cpu" else softmax_in_lanes(scores)


def softmax_in_lanes(scores: Tensor) -> Tensor:
    """The same with every addition spelled out: LANES partial sums from the left, then folded in halves."""
    exps = (scores - scores.amax(-1, keepdim=True)).exp()
    total = torch.zeros_like(exps[..., :LANES])
    for start in range(0, exps.shape[-1], LANES):
        total += exps[..., start : start + LANES]
    while total.shape[-1] > 1:
        low, high = total.chunk(2, dim=-1)
        total = low + high
    return exps * total.reciprocal()


def _gather(
    group: Tensor, kv_scales: Tensor | None, layer: int, plane: int, cache_rows: Tensor, dtype: torch.dtype
) -> Tensor:
    """cache_rows [T, J · KV_TILE] → [T · kv heads · J, KV_TILE, D] of `dtype`."""
    offsets = head_offsets(group) + plane_offset(group, layer, plane)
    rows = (cache_rows[:, None] + offsets[:, None]).view(-1)
    if kv_scales is None:
        found = flat_rows(group).index_select(0, rows).to(dtype)
    else:
        codes = flat_rows(group.view(torch.uint8)).index_select(0, rows).view(group.dtype)
        run, places = flat_scales(kv_scales, group, rows)
        found = restore(codes, run.index_select(0, places), dtype)
    return found.view(-1, KV_TILE, group.shape[-1])
