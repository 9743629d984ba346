"""Linear layers in exact tiles: a row's product never depends on how many rows there are."""

from __future__ import annotations

import torch
from torch import Tensor

# Every product has this many rows, zero rows if need be. A matrix library picks its algorithm by shape,
# so one shape a layer means one order of additions, whatever the batch.
ROW_TILE = 16


def pad_rows(x: Tensor) -> Tensor:
    """x [N, ...] → [N', ...] with zero rows up to the next multiple of ROW_TILE, or x itself."""
    missing = -x.shape[0] % ROW_TILE
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K], weight [M, K], bias [M], all of one dtype → x · weightᵀ + bias, [N, M], in that dtype."""
    padded = pad_rows(x.contiguous())
    out = x.new_empty(padded.shape[0], weight.shape[0])
    transposed = weight.t()
    for start in range(0, padded.shape[0], ROW_TILE):
        tile, result = padded[start : start + ROW_TILE], out[start : start + ROW_TILE]
        if bias is None:
            torch.mm(tile, transposed, out=result)
        else:
            torch.addmm(bias, tile, transposed, out=result)
    return out[: x.shape[0]]
