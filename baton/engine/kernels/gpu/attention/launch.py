"""The parts that launchers of decode attention share: checks of their tensors, and arguments of kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from baton.device.ptx import ON_CHIP
from baton.engine.kernels.gpu.attention.items import Heads, Items


def check_product(qkv: Tensor, rotary: tuple[Tensor, Tensor], heads: Heads) -> None:
    """Raises ValueError unless `qkv` is a contiguous product of these heads, and `rotary` has its rows."""
    rows = qkv.shape[0]
    check_shapes(
        qkv=(qkv, (rows, (heads.heads + 2 * heads.kv_heads) * heads.dim)),
        rotary=(rotary[0], (rows, heads.dim // 2)),
    )
    if not qkv.is_contiguous():
        raise ValueError("qkv must be contiguous")


def check_shapes(**tensors: tuple[Tensor, tuple[int, ...]]) -> None:
    """Raises ValueError for the first of these tensors that has another shape than is expected."""
    for name, (tensor, expected) in tensors.items():
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {expected}")


def check_cache(cache: Tensor, kv_scales: Tensor | None, qkv: Tensor, heads: Heads) -> None:
    """Raises ValueError unless `cache` is a cache group's tensor for these heads, of qkv's dtype, or of codes
    with their scales."""
    got = tuple(cache.shape[2:4]) + tuple(cache.shape[5:])
    if got != (2, heads.kv_heads, heads.dim) or not cache[0, 0].is_contiguous():
        raise ValueError(f"the cache is {tuple(cache.shape)}, or its layers are not contiguous")
    if qkv.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"qkv is {qkv.dtype}")
    if kv_scales is None:
        if qkv.dtype != cache.dtype:
            raise ValueError(f"qkv is {qkv.dtype}, the cache {cache.dtype}")
    elif (cache.dtype, kv_scales.dtype) != (torch.float8_e4m3fn, torch.bfloat16):
        raise ValueError(f"the cache is {cache.dtype}, its scales {kv_scales.dtype}")
    elif tuple(kv_scales.shape[:1] + kv_scales.shape[2:]) != (len(cache), *cache.shape[3:5], 2):
        raise ValueError(f"the scales are {tuple(kv_scales.shape)}, the cache {tuple(cache.shape)}")


def check_table(tables: Tensor) -> None:
    """Raises ValueError unless these are block tables as kernels read them."""
    if tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise ValueError("block tables are int32 with contiguous rows")


def scale_pairs(cache: Tensor, kv_scales: Tensor | None, layer: int) -> tuple[Tensor, int, int]:
    """Arguments of kernels for the cache's scales, or in place of them: an int32 for the two of each token
    and head (see `unpacked`), the offset of a layer, and the stride of blocks."""
    if kv_scales is None:
        return cache, 0, 0
    pairs = kv_scales.view(torch.int32)
    return pairs, layer * pairs.stride(1), pairs.stride(0)


def cache_arguments(
    qkv: Tensor,
    cache: Tensor,
    layer: int,
    block_table: Tensor,
    rotary: tuple[Tensor, Tensor],
    heads: Heads,
    norms: tuple[Tensor, Tensor] | None,
    kv_scales: Tensor | None,
) -> dict[str, Any]:
    """Arguments of a kernel that reads a product's rows and a layer of the cache, by their names. Raises
    ValueError for shapes that do not fit."""
    check_product(qkv, rotary, heads)
    check_cache(cache, kv_scales, qkv, heads)
    check_table(block_table)
    pairs, pair_layer_offset, pair_block_stride = scale_pairs(cache, kv_scales, layer)
    return {
        "qkv": qkv,
        "cache": cache,
        "scale_pairs": pairs,
        "block_table": block_table,
        "cos_rows": rotary[0],
        "sin_rows": rotary[1],
        "table_stride": block_table.stride(0),
        "layer_offset": layer * cache.stride(1),
        "block_stride": cache.stride(0),
        "plane_stride": cache.stride(2),
        "scale_layer_offset": pair_layer_offset,
        "scale_block_stride": pair_block_stride,
        "eps": heads.norm_eps,
        "HEADS": heads.heads,
        "KV_HEADS": heads.kv_heads,
        "DIM": heads.dim,
        "DIM_PADDED": max(16, triton.next_power_of_2(heads.dim)),
        "BLOCK_TOKENS": cache.shape[4],
        "QK_NORM": norms is not None,
        "CODES": kv_scales is not None,
    }


def item_arguments(
    out: Tensor, qkv: Tensor, items: Items, heads: Heads, rows_per_item: int
) -> dict[str, Any]:
    """Arguments of a kernel of decode attention that say what it works on, and where results go. Raises
    ValueError for shapes that do not fit."""
    rows = qkv.shape[0]
    check_shapes(
        out=(out, (rows, heads.heads * heads.dim)),
        items=(items.sums[0], (rows_per_item * heads.heads, heads.dim)),
    )
    if items.arrived.shape[0] < rows:
        raise ValueError(f"the items are of {items.arrived.shape[0]} rows, qkv has {rows}")
    if not out.is_contiguous():
        raise ValueError("out must be contiguous")
    return {
        "item_count": items.count,
        "items": items.items,
        "sums": items.sums,
        "scales": items.scales,
        "arrived": items.arrived,
        "out": out,
        "scale": heads.log2_scale,
        "window": heads.seen,
        "GROUP": heads.group,
        "UPCAST": qkv.dtype == torch.float32 or not ON_CHIP.value,
    }
