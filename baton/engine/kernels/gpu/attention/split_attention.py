"""Decode attention over the paged cache: one new token a row, split over the chip, one node a layer.

    q, k: norm (some families), rotary; the new k, v go into the cache
    out = softmax(q · Kᵀ · scale) · V      over positions (p - window, p]

The work of a layer is a list of items (`plan_items`): a run of whole tiles of one row's context. A program
does one item for one KV head with all query heads of its group, so K and V are read once. The item that holds
the new token takes it from the product's output, never from the cache, so that no program waits for a write.
A row of several items is combined by the program that arrives last, in the order of the items, whichever it
is, so a row's result depends on its items alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.attention.attend_tiles import attend_tiles, deliver
from baton.engine.kernels.gpu.attention.items import (
    ITEM_WIDTH,
    AttentionTuning,
    Heads,
    Items,
    load_item,
)
from baton.engine.kernels.gpu.attention.launch import cache_arguments, item_arguments
from baton.engine.kernels.gpu.attention.new_token import load_heads, write_token

_TUNING = AttentionTuning()
# Parts of a row that are loaded at once where they are joined, at most, and registers of a thread for them.
_MOST_AHEAD, _JOINING_REGISTERS = 8, 64


@triton.jit
def _split_attention(
    qkv,
    cache,
    scale_pairs,
    block_table,
    cos_rows,
    sin_rows,
    query_norm,
    key_norm,
    item_count,
    items,
    sums,
    scales,
    arrived,
    out,
    table_stride,
    layer_offset,
    block_stride,
    plane_stride,
    scale_layer_offset,
    scale_block_stride,
    scale,
    eps,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    GROUP_POWER: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    QK_NORM: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    CODES: tl.constexpr,
):
    head = tl.program_id(0)
    item = tl.program_id(1)
    line = items + item * ITEM_WIDTH
    row, slot, position, begin, end, first, parts = load_item(line)
    if item >= tl.load(item_count):
        return
    table = block_table + slot.to(tl.int64) * table_stride
    # Read a tile ahead: a copy whose address waits for a load of its own pass is not kept in flight.
    next_block = tl.load(table + begin // BLOCK_TOKENS)
    last_block = tl.load(table + position // BLOCK_TOKENS).to(tl.int64)

    # The dtype of the products' operands. Codes become float16 in one instruction, bfloat16 in many.
    wide: tl.constexpr = tl.float32 if UPCAST else (tl.float16 if CODES else qkv.dtype.element_ty)
    half: tl.constexpr = DIM // 2
    d = tl.arange(0, DIM_PADDED)
    g = tl.arange(0, GROUP_PADDED)
    cos = tl.load(cos_rows + row * half + d % half, mask=d < DIM, other=0.0)
    sin = tl.load(sin_rows + row * half + d % half, mask=d < DIM, other=0.0)
    mine = qkv + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
    q = load_heads(
        mine + (head * GROUP + g)[:, None] * DIM, g < GROUP, cos[None, :], sin[None, :], query_norm, eps,
        DIM, DIM_PADDED, QK_NORM,
    ).to(wide)  # fmt: skip

    highest = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    attn_out = tl.zeros((GROUP_PADDED, DIM_PADDED), tl.float32)
    layer = cache + layer_offset + head * (BLOCK_TOKENS * DIM)
    layer_scales = scale_pairs + scale_layer_offset + head * BLOCK_TOKENS
    if end > position:
        k, v = write_token(
            mine, head, layer, layer_scales, last_block, position,
            block_stride, plane_stride, scale_block_stride, cos, sin, key_norm, eps,
            HEADS, KV_HEADS, DIM, DIM_PADDED, BLOCK_TOKENS, QK_NORM, CODES,
        )  # fmt: skip
        highest = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
        total += 1.0
        attn_out += v.to(tl.float32)

    highest, total, attn_out = attend_tiles(
        q, position, highest, total, attn_out, layer, layer_scales, table, next_block,
        begin, tl.minimum(end, position), position, tl.maximum(position - window + 1, 0),
        block_stride, plane_stride, scale_block_stride, scale, window,
        DIM, DIM_PADDED, GROUP_PADDED, 1, True, BLOCK_TOKENS, TILE, STAGES, CODES,
    )  # fmt: skip
    deliver(
        out, sums, scales, arrived, highest, total, attn_out, item, first, parts, row, head, GROUP,
        HEADS, KV_HEADS, DIM, DIM_PADDED, GROUP, 1, GROUP_PADDED, GROUP_POWER, AHEAD,
    )  # fmt: skip


def split_attention(
    out: Tensor,
    qkv: Tensor,
    cache: Tensor,
    layer: int,
    block_table: Tensor,
    rotary: tuple[Tensor, Tensor],
    items: Items,
    heads: Heads,
    norms: tuple[Tensor, Tensor] | None = None,
    tuning: AttentionTuning | None = None,
    most_items: int | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Attends for one row a slot: qkv [R, (heads + 2 kv heads) · dim] → out [R, heads · dim]; writes the
    rows' k, v into `cache`.

    `cache` is the cache group's tensor [blocks, layers, planes, kv heads, block tokens, dim] of qkv's dtype
    (float32, bfloat16 or float16), or of codes with their scales `kv_scales`: the rows' k, v are then
    quantised, and read as the cache has them. `layer` counts within the group; block_table [slots, W] int32;
    `rotary`: cos, sin [R, dim / 2] float32; `norms`: weights of query and key norm; `most_items` bounds the
    items there can be, else the list's length does. Rows without items are not written. Raises ValueError
    for shapes that do not fit.
    """
    shared = cache_arguments(qkv, cache, layer, block_table, rotary, heads, norms, kv_scales)
    query_norm, key_norm = norms if norms is not None else (qkv, qkv)
    _split_attention[(heads.kv_heads, items.items.shape[0] if most_items is None else most_items)](
        query_norm=query_norm,
        key_norm=key_norm,
        GROUP_PADDED=max(16, triton.next_power_of_2(heads.group)),
        GROUP_POWER=triton.next_power_of_2(heads.group),
        TILE=(tuning or _TUNING).tile,
        STAGES=(tuning or _TUNING).stages_of(heads.dim * cache.element_size()),
        AHEAD=_parts_ahead(heads, (tuning or _TUNING).warps),
        num_warps=(tuning or _TUNING).warps,
        maxnreg=(tuning or _TUNING).registers,
        **shared,
        **item_arguments(out, qkv, items, heads, 1),
    )


def _parts_ahead(heads: Heads, warps: int) -> int:
    """Number of parts of a row that a program of so many warps has registers for, besides those it adds."""
    part: int = triton.next_power_of_2(heads.group) * max(16, triton.next_power_of_2(heads.dim))
    return max(1, min(_MOST_AHEAD, _JOINING_REGISTERS * 32 * warps // part))
