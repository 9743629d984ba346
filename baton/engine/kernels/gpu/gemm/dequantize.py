"""A quantised weight at full width, for products that have no kernel of its format."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.gemm.code_values import INT4, KINDS
from baton.engine.kernels.quantized_weight import QuantizedWeight

_BLOCK = 1024


@triton.jit
def _dequantize(
    codes, scales, zeros, out, K, ROW_BYTES, GROUPS, GROUP,
    SCALE_ROWS: tl.constexpr, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = k < K
    group = (row // SCALE_ROWS) * GROUPS + tl.minimum(k // GROUP, GROUPS - 1)
    scale = tl.load(scales + group, mask=kept, other=0.0)
    if KIND == INT4:
        byte = tl.load(codes + row * ROW_BYTES + k // 128 * 64 + k % 64, mask=kept, other=0).to(tl.int32)
        values = ((byte >> tl.where(k % 128 < 64, 0, 4)) & 15).to(tl.float32)
        if HAS_ZEROS:
            values -= tl.load(zeros + group, mask=kept, other=0).to(tl.float32)
        else:
            values -= 8.0
    else:
        values = tl.load(codes + row * ROW_BYTES + k, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + row * K + k, (values * scale).to(out.dtype.element_ty), mask=kept)


def dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """W [N, K] of the dtype, as `QuantizedWeight.dequantized` computes it."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    weight_format = weight.format
    _dequantize[(rows, triton.cdiv(columns, _BLOCK))](
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out,
        columns,
        weight.codes[0].numel(),
        weight.scales.shape[1],
        weight_format.scale_columns or columns,
        SCALE_ROWS=weight_format.scale_rows,
        KIND=KINDS[weight_format.codes],
        HAS_ZEROS=weight.zeros is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out
