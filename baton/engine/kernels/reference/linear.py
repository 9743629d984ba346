"""Linear layers in exact tiles: a row's product never depends on its place or on how many rows there are.

A matrix library chooses its order of additions by shape and by alignment. So products have a fixed number
of rows, and rows of a length that puts each at the same alignment: with both, what a row yields depends
neither on how many rows there are nor on its place among them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.kernels.quantized_weight import Weight, dense

ROW_TILE = 16
# Elements. Measured: with rows at addresses that are not multiples of 16 bytes, MKL's result for a row
# changes with its place in the tile; lengths in multiples of 8 elements rule that out for every dtype.
INNER_TILE = 8


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [N, K], weight [M, K], bias [M], all of one dtype → x · weightᵀ + bias, [N, M], in that dtype.

    A weight in fewer bits is dequantised to that dtype first.
    """
    padded = pad_rows(pad_inner(x).contiguous())
    transposed = pad_inner(dense(weight, x.dtype)).t()
    out = x.new_empty(padded.shape[0], weight.shape[0])
    for start in range(0, padded.shape[0], ROW_TILE):
        tile, result = padded[start : start + ROW_TILE], out[start : start + ROW_TILE]
        if bias is None:
            torch.mm(tile, transposed, out=result)
        else:
            torch.addmm(bias, tile, transposed, out=result)
    return out[: x.shape[0]]


def pad_rows(x: Tensor) -> Tensor:
    """x [N, ...] → [N', ...] with zero rows up to the next multiple of ROW_TILE, or x itself."""
    missing = -x.shape[0] % ROW_TILE
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def pad_inner(x: Tensor) -> Tensor:
    """x [..., K] → [..., K'] with zeros up to the next multiple of INNER_TILE, or x itself."""
    missing = -x.shape[-1] % INNER_TILE
    return torch.nn.functional.pad(x, (0, missing)) if missing else x
