"""Writes keys and values of a step's rows into the paged cache, and finds cache rows for the readers.

A cache group's tensor [blocks, layers, planes, heads, block tokens, dim] is seen as flat rows of `dim`
elements. A token's row for head h of (layer, plane) is

    ((block · layers + layer) · planes + plane) · heads · block_tokens + h · block_tokens + offset
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_rows(group: Tensor, block_table: Tensor, positions: Tensor) -> Tensor:
    """Flat row of (layer 0, plane 0, head 0) for each position.

    group: the group's tensor; block_table [..., max blocks] int64; positions [..., P] int64, of the same
    leading dimensions → [..., P] int64.
    """
    _, layers, planes, heads, block_tokens, _ = group.shape
    blocks = block_table.gather(-1, positions // block_tokens)
    return blocks * (layers * planes * heads * block_tokens) + positions % block_tokens


def plane_offset(group: Tensor, layer: int, plane: int) -> int:
    """The offset to add to `token_rows` for the group's layer number `layer` and its plane."""
    _, _, planes, heads, block_tokens, _ = group.shape
    return (layer * planes + plane) * heads * block_tokens


def head_offsets(group: Tensor) -> Tensor:
    """The offset to add to `token_rows` for each head: [heads] int64."""
    _, _, _, heads, block_tokens, _ = group.shape
    return torch.arange(heads, device=group.device) * block_tokens


def cache_write(group: Tensor, layer: int, keys: Tensor, values: Tensor, rows: Tensor) -> None:
    """keys, values [N, heads, dim] in the cache's dtype go to `rows` [N] (from `token_rows`) of `layer`.

    Rows that meet in one place must be padding (block 0): which of them stays is not defined.
    """
    flat = group.view(-1, group.shape[-1])
    heads = rows[:, None] + head_offsets(group)
    for plane, new in enumerate((keys, values)):
        target = (heads + plane_offset(group, layer, plane)).reshape(-1)
        flat.index_copy_(0, target, new.reshape(-1, new.shape[-1]))
