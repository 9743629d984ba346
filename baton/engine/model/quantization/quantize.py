"""Quantises a matrix by rounding to the nearest code."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.kernels.quantized_weight import QuantizedWeight, pack_int4
from baton.engine.kernels.weight_format import WeightFormat

_FP8_MAX, _INT8_MAX = 448.0, 127.0
# Shares of the scale that covers the largest element, of which the one with the least error is taken.
_INT4_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


def quantize(weight: Tensor, weight_format: WeightFormat) -> QuantizedWeight:
    """weight [N, K] of any floating dtype → its codes and scales. Raises ValueError where an element is not
    finite."""
    rows, columns = weight.shape
    matrix = weight.to(torch.float32)
    if not bool(matrix.isfinite().all()):
        raise ValueError("has elements that are not finite")
    height, width = weight_format.scale_rows, weight_format.scale_columns or columns
    padded = torch.nn.functional.pad(matrix, (0, -columns % width, 0, -rows % height))
    down, across = padded.shape[0] // height, padded.shape[1] // width
    blocks = padded.view(down, height, across, width).transpose(1, 2)
    if weight_format.codes == "int4":
        return _int4(blocks.squeeze(2), weight_format, columns)
    most = _FP8_MAX if weight_format.codes == "fp8" else _INT8_MAX
    scales = (blocks.abs().amax((-1, -2)) / most).clamp(min=torch.finfo(torch.float32).tiny)
    units = (blocks / scales[..., None, None]).clamp(-most, most)
    units = units.transpose(1, 2).reshape(padded.shape)[:rows, :columns].contiguous()
    codes = units.to(torch.float8_e4m3fn) if weight_format.codes == "fp8" else units.round().to(torch.int8)
    return QuantizedWeight(weight_format, columns, codes, scales)


def _int4(groups: Tensor, weight_format: WeightFormat, columns: int) -> QuantizedWeight:
    """groups [N, groups, width]. Symmetric codes are -8 to 7: the largest element takes the end that has one
    more of them, so scales may be negative."""
    tiny = torch.finfo(torch.float32).tiny
    if weight_format.zeros:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=tiny)
        zeros = (-low / scales).round().clamp(0, 15)
        codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    else:
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
        whole = torch.where(largest.abs() < tiny, torch.full_like(largest, tiny), largest / -8)
        scales, least = whole, torch.full_like(whole, torch.inf)
        for share in _INT4_SHARES:
            tried = whole * share
            restored = (groups / tried[..., None]).round().clamp(-8, 7) * tried[..., None]
            error = (restored - groups).square().sum(-1)
            scales = torch.where(error < least, tried, scales)
            least = torch.minimum(error, least)
        codes, zeros = (groups / scales[..., None]).round().clamp(-8, 7) + 8, None
    packed = pack_int4(codes.to(torch.uint8).flatten(1)[:, :columns])
    return QuantizedWeight(
        weight_format, columns, packed, scales, None if zeros is None else zeros.to(torch.uint8)
    )
