"""Writes keys and values of a step's rows into the paged cache, and finds cache rows for the readers.

A cache group's tensor [blocks, layers, 2, heads, block tokens, dim] (`KVCache.groups`) is seen as flat rows
of `dim` elements. A token's row for head h of (layer, plane) is

    block · (rows a block) + layer · (rows a layer) + plane · heads · block_tokens + h · block_tokens + offset

where a layer has 2 · heads · block_tokens rows, and as many more as its scales take. The scale of a row is
found from the row's number within its layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.kernels.reference.kv_codes import quantise


def token_rows(group: Tensor, block_table: Tensor, positions: Tensor) -> Tensor:
    """Flat row of (layer 0, plane 0, head 0) for each position.

    group: the group's tensor; block_table [..., max blocks] int64; positions [..., P] int64, of the same
    leading dimensions → [..., P] int64.
    """
    block_tokens, dim = group.shape[4:]
    blocks = block_table.gather(-1, positions // block_tokens)
    return blocks * (group.stride(0) // dim) + positions % block_tokens


def plane_offset(group: Tensor, layer: int, plane: int) -> int:
    """The offset to add to `token_rows` for the group's layer number `layer` and its plane."""
    return (layer * group.stride(1) + plane * group.stride(2)) // group.shape[5]


def head_offsets(group: Tensor) -> Tensor:
    """The offset to add to `token_rows` for each head: [heads] int64."""
    _, _, _, heads, block_tokens, _ = group.shape
    return torch.arange(heads, device=group.device) * block_tokens


def flat_rows(group: Tensor) -> Tensor:
    """The group's memory as rows [R, dim] of its dtype, the rows behind a layer's codes included."""
    blocks, layers, dim = group.shape[0], group.shape[1], group.shape[5]
    return group.as_strided((blocks * layers * group.stride(1) // dim, dim), (dim, 1))


def flat_scales(scales: Tensor, group: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of flat rows of the group's tensor: the memory from the first scale on [S], and the rows'
    places in it."""
    blocks, layers, heads, block_tokens, planes = scales.shape
    stride, rows_a_layer = scales.stride(1), group.stride(1) // group.shape[5]
    run = scales.as_strided(((blocks * layers - 1) * stride + heads * block_tokens * planes,), (1,))
    row = rows % rows_a_layer
    plane, token = row // (heads * block_tokens), row % (heads * block_tokens)
    return run, rows // rows_a_layer * stride + token * planes + plane


def cache_write(
    group: Tensor, layer: int, keys: Tensor, values: Tensor, rows: Tensor, scales: Tensor | None = None
) -> None:
    """keys, values [N, heads, dim] go to `rows` [N] (from `token_rows`) of `layer`; with `scales`
    (`KVCache.scales`) they are quantised, else they must be of the cache's dtype.

    Rows that meet in one place must be padding (block 0): which of them stays is not defined.
    """
    heads = rows[:, None] + head_offsets(group)
    for plane, new in enumerate((keys, values)):
        target = (heads + plane_offset(group, layer, plane)).reshape(-1)
        written = new.reshape(-1, new.shape[-1])
        if scales is None:
            flat_rows(group).index_copy_(0, target, written)
            continue
        codes, row_scales = quantise(written)
        flat_rows(group.view(torch.uint8)).index_copy_(0, target, codes.view(torch.uint8))
        run, places = flat_scales(scales, group, target)
        run.index_copy_(0, places, row_scales)
