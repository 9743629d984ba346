"""Linear layers in exact tiles: a row's product never depends on its place or on how many rows there are."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.kernels.reference.exact_tiles import ROW_TILE, pad_inner, pad_rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K], weight [M, K], bias [M], all of one dtype → x · weightᵀ + bias, [N, M], in that dtype."""
    padded = pad_rows(pad_inner(x).contiguous())
    transposed = pad_inner(weight).t()
    out = x.new_empty(padded.shape[0], weight.shape[0])
    for start in range(0, padded.shape[0], ROW_TILE):
        tile, result = padded[start : start + ROW_TILE], out[start : start + ROW_TILE]
        if bias is None:
            torch.mm(tile, transposed, out=result)
        else:
            torch.addmm(bias, tile, transposed, out=result)
    return out[: x.shape[0]]
