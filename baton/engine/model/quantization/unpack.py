"""Stored tensors of a quantised matrix → the form that the engine holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from baton.engine.kernels.quantized_weight import QuantizedWeight, pack_int4
from baton.engine.kernels.weight_format import WeightFormat
from baton.engine.model.quantization.scheme import StoredFormat

# Column of W that each nibble of AWQ's words holds, from the lowest.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SYMMETRIC_ZERO = 8


class UnpackError(ValueError):
    """A stored tensor cannot be unpacked; `suffix` names the tensor, the message says why."""

    def __init__(self, suffix: str, why: str) -> None:
        super().__init__(why)
        self.suffix = suffix


def unpack(stored: StoredFormat, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedWeight:
    """The matrix W [rows, columns] whose tensors `parts` holds by suffix, of the shapes that `stored_parts`
    allows, on any device. Raises UnpackError for values that the format does not have."""
    weight_format = stored.format
    if stored.container == "packed":
        return _packed(weight_format, parts, rows, columns)
    if stored.container == "gptq":
        return _gptq(stored, parts, rows, columns)
    if stored.container == "awq":
        return _awq(weight_format, parts, rows, columns)
    scales = _finite(parts, "weight_scale" if "weight_scale" in parts else "weight_scale_inv")
    if not weight_format.scale_columns:
        scales = scales.reshape(-1, 1).expand(rows, 1)
    return QuantizedWeight(weight_format, columns, parts["weight"].contiguous(), scales.contiguous())


def _packed(
    weight_format: WeightFormat, parts: Mapping[str, Tensor], rows: int, columns: int
) -> QuantizedWeight:
    """compressed-tensors: eight codes of a row in a word, the lowest first; zeros likewise, of a column."""
    _check_groups(weight_format, parts, "weight_g_idx", columns)
    codes = _nibbles(parts["weight_packed"])[:, :columns]
    zeros = None
    if weight_format.zeros:
        zeros = _nibbles(parts["weight_zero_point"].t()).t()[:rows].contiguous()
    return QuantizedWeight(weight_format, columns, pack_int4(codes), _finite(parts, "weight_scale"), zeros)


def _gptq(stored: StoredFormat, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedWeight:
    """GPTQ: eight codes of a row in a word, transposed; zeros of neighbouring rows in a word."""
    weight_format = stored.format
    _check_groups(weight_format, parts, "g_idx", columns)
    codes = _nibbles(parts["qweight"].t())[:, :columns]
    zeros = _nibbles(parts["qzeros"])[:, :rows].t().contiguous()
    if weight_format.zeros:
        zeros = (zeros + 1) & 15 if stored.zeros_less_one else zeros
        return QuantizedWeight(weight_format, columns, pack_int4(codes), _transposed_scales(parts), zeros)
    # Checkpoints lie about their version: by the values, which are those of the format's symmetric zero.
    low, high = (int(n) for n in zeros.aminmax())
    if low != high or low not in (_SYMMETRIC_ZERO - 1, _SYMMETRIC_ZERO):
        raise UnpackError("qzeros", f"has zeros from {low} to {high}, of a symmetric format all 7 or all 8")
    return QuantizedWeight(weight_format, columns, pack_int4(codes), _transposed_scales(parts))


def _awq(
    weight_format: WeightFormat, parts: Mapping[str, Tensor], rows: int, columns: int
) -> QuantizedWeight:
    """AWQ: codes of eight neighbouring rows in a word, in an order of its own; zeros likewise."""
    order = torch.tensor(_AWQ_ORDER, device=parts["qweight"].device).argsort()
    codes, zeros = (
        _nibbles(parts[name])
        .view(-1, parts[name].shape[1], 8)[..., order]
        .flatten(1)[:, :rows]
        .t()
        .contiguous()
        for name in ("qweight", "qzeros")
    )
    return QuantizedWeight(weight_format, columns, pack_int4(codes), _transposed_scales(parts), zeros)


def _nibbles(words: Tensor) -> Tensor:
    """words [A, B] int32 → [A, 8 B] uint8, the lowest four bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(1)


def _transposed_scales(parts: Mapping[str, Tensor]) -> Tensor:
    return _finite(parts, "scales").t().contiguous()


def _finite(parts: Mapping[str, Tensor], suffix: str) -> Tensor:
    """A tensor of scales as float32."""
    scales = parts[suffix].to(torch.float32)
    if not bool(scales.isfinite().all()):
        raise UnpackError(suffix, "has scales that are not finite")
    return scales


def _check_groups(
    weight_format: WeightFormat, parts: Mapping[str, Tensor], suffix: str, columns: int
) -> None:
    """Refuses columns that are not in the order of their groups (act-order with `desc_act`)."""
    if suffix not in parts:
        return
    found, size = parts[suffix], weight_format.scale_columns or columns
    if not torch.equal(found.to(torch.int64), torch.arange(columns, device=found.device) // size):
        raise UnpackError(suffix, "assigns columns to groups out of order (desc_act), which is not supported")
