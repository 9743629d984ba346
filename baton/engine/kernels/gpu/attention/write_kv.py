"""Writes the keys and values of a step's rows into the paged cache: one node a layer, before attention of an
item a row, where a slot's rows read each other's (mode `exact`).

The bits are those that `split_attention` writes for a row of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.attention.items import AttentionTuning, Heads
from baton.engine.kernels.gpu.attention.launch import cache_arguments
from baton.engine.kernels.gpu.attention.new_token import write_token

_TUNING = AttentionTuning()


@triton.jit
def _write_kv(
    qkv,
    cache,
    scale_pairs,
    block_table,
    cos_rows,
    sin_rows,
    key_norm,
    row_count,
    row_slot,
    row_position,
    table_stride,
    layer_offset,
    block_stride,
    plane_stride,
    scale_layer_offset,
    scale_block_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    QK_NORM: tl.constexpr,
    CODES: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    if row >= tl.load(row_count):
        return
    position = tl.load(row_position + row)
    table = block_table + tl.load(row_slot + row).to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_TOKENS).to(tl.int64)
    half: tl.constexpr = DIM // 2
    d = tl.arange(0, DIM_PADDED)
    cos = tl.load(cos_rows + row * half + d % half, mask=d < DIM, other=0.0)
    sin = tl.load(sin_rows + row * half + d % half, mask=d < DIM, other=0.0)
    write_token(
        qkv + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM), head,
        cache + layer_offset + head * (BLOCK_TOKENS * DIM),
        scale_pairs + scale_layer_offset + head * BLOCK_TOKENS,
        block, position, block_stride, plane_stride, scale_block_stride, cos, sin, key_norm, eps,
        HEADS, KV_HEADS, DIM, DIM_PADDED, BLOCK_TOKENS, QK_NORM, CODES,
    )  # fmt: skip


def write_kv(
    qkv: Tensor,
    cache: Tensor,
    layer: int,
    block_table: Tensor,
    rotary: tuple[Tensor, Tensor],
    row_count: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    heads: Heads,
    norms: tuple[Tensor, Tensor] | None = None,
    tuning: AttentionTuning | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Writes the keys, normed and rotated, and the values of the first `row_count` rows of qkv [R, (heads + 2
    kv heads) · dim] to `cache`, quantised where it holds codes.

    qkv stays as it is. `row_count`: an integer on the device, no more than R; `row_slot`, `row_position` [R]
    int32: a row's line of `block_table` and its position there, which no two rows share. The rest as in
    `split_attention`. Raises ValueError for shapes that do not fit.
    """
    shared = cache_arguments(qkv, cache, layer, block_table, rotary, heads, norms, kv_scales)
    rows = qkv.shape[0]
    for name, line in (("row_slot", row_slot), ("row_position", row_position)):
        if line.shape[0] < rows or line.stride(0) != 1 or line.dtype != torch.int32:
            raise ValueError(f"{name} is {tuple(line.shape)} {line.dtype}, qkv has {rows} rows")
    if row_count.numel() != 1 or row_count.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"row_count is {tuple(row_count.shape)} {row_count.dtype}, expected one integer")
    _write_kv[(heads.kv_heads, rows)](
        key_norm=qkv if norms is None else norms[1],
        row_count=row_count,
        row_slot=row_slot,
        row_position=row_position,
        num_warps=(tuning or _TUNING).warps,
        **shared,
    )
