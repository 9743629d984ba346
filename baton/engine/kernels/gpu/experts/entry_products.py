"""The products of a few rows with their experts, without matrix units: an entry is a row and one of its
experts, and few rows seldom have an expert in common.

    gate_up_entries    inner[entry] = gate(x[row])                     of the entry's expert
    add_down_entries   hidden[row] += Σ weight · down(inner[entry])    over the row's entries, in their order

Each program streams some rows of its experts' matrices and uses them once, as in `gemv`. Sums are float32.
Experts are as they are, or in fewer bits: fp8 with a scale a row or a block, int4 with a scale a group.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import dependent_launch, wait_for_previous
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.experts.grouped_codes import check_fits
from baton.engine.kernels.gpu.gemm.code_values import FP8, INT4, KINDS
from baton.engine.kernels.gpu.gemm.gemv import GemvTuning, gated
from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
from baton.engine.kernels.weight_format import INT4_SPAN
from baton.engine.kernels.weight_stack import WeightStack

_VALUES = tl.constexpr(-1)  # the kind of a weight that is not quantised
_HALF_SPAN = tl.constexpr(INT4_SPAN // 2)
# Tiles of a sum that are loaded without a loop, so that many are on their way at once. More take long to
# compile.
_MOST_UNROLLED, _STAGES = 64, 3
# Entries of a row or two leave multiprocessors without work, unless programs take few rows of W.
_FEW_ROWS = 2


@triton.jit
def _products(
    weight, scales, zeros, x, rows, start, K, ROW_BYTES, GROUPS,
    BK: tl.constexpr, KIND: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """W[rows, columns] · x[columns] of BK columns from `start` on, not added up: [BN, BK], of int4 [BN, BK /
    2]. Scales of whole rows are left out."""
    row_starts = weight + rows.to(tl.int64)[:, None] * ROW_BYTES
    if KIND == INT4:
        place = tl.arange(0, BK // 2)
        low_k = start + place // _HALF_SPAN * (2 * _HALF_SPAN) + place % _HALF_SPAN
        high_k = low_k + _HALF_SPAN
        spans = (K + 2 * _HALF_SPAN - 1) // (2 * _HALF_SPAN) * _HALF_SPAN
        at = start // 2 + place
        codes = tl.load(row_starts + at[None, :], mask=(at < spans)[None, :], other=0)
        low_x = tl.load(x + low_k, mask=low_k < K, other=0.0).to(tl.float32)[None, :]
        high_x = tl.load(x + high_k, mask=high_k < K, other=0.0).to(tl.float32)[None, :]
        low_group = tl.minimum(low_k // GROUP, GROUPS - 1) if GROUP else low_k * 0
        high_group = tl.minimum(high_k // GROUP, GROUPS - 1) if GROUP else low_group
        groups = (rows * GROUPS)[:, None]
        low = (codes & 15).to(tl.float32)
        high = (codes >> 4).to(tl.float32)
        if HAS_ZEROS:
            low -= tl.load(zeros + groups + low_group[None, :]).to(tl.float32)
            high -= tl.load(zeros + groups + high_group[None, :]).to(tl.float32)
        else:
            low -= 8.0
            high -= 8.0
        if GROUP:
            low *= tl.load(scales + groups + low_group[None, :])
            high *= tl.load(scales + groups + high_group[None, :])
        return low * low_x + high * high_x
    else:
        k = start + tl.arange(0, BK)
        if EVEN:
            values = tl.load(row_starts + k[None, :])
            xs = tl.load(x + k)
        else:
            values = tl.load(row_starts + k[None, :], mask=(k < K)[None, :], other=0.0)
            xs = tl.load(x + k, mask=k < K, other=0.0)
        products = values.to(tl.float32) * xs.to(tl.float32)[None, :]
        if KIND == FP8 and GROUP > 0:
            products *= tl.load(scales + (rows // SCALE_ROWS) * GROUPS + start // GROUP)[:, None]
        return products


@triton.jit
def _gate_up(
    inner, x, ids, weight, scales, zeros, N, K, ROW_BYTES, GROUPS, top_k,
    BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, EPILOGUE: tl.constexpr,
    KIND: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        wait_for_previous()
    entry = tl.program_id(1)
    expert = tl.load(ids + entry)
    if expert < 0:
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    gates = expert * 2 * N + tl.minimum(n, N - 1)
    ups = gates + N
    x += (entry // top_k).to(tl.int64) * K
    WIDTH: tl.constexpr = BK // 2 if KIND == INT4 else BK
    gate = tl.zeros((BN, WIDTH), tl.float32)
    up = tl.zeros((BN, WIDTH), tl.float32)
    for step in tl.static_range(STEPS):
        gate += _products(
            weight, scales, zeros, x, gates, step * BK, K, ROW_BYTES, GROUPS,
            BK, KIND, SCALE_ROWS, GROUP, HAS_ZEROS, EVEN,
        )  # fmt: skip
        up += _products(
            weight, scales, zeros, x, ups, step * BK, K, ROW_BYTES, GROUPS,
            BK, KIND, SCALE_ROWS, GROUP, HAS_ZEROS, EVEN,
        )  # fmt: skip
    gate_sums = tl.sum(gate, 1)
    up_sums = tl.sum(up, 1)
    if KIND >= 0 and GROUP == 0:
        gate_sums *= tl.load(scales + gates)
        up_sums *= tl.load(scales + ups)
    dtype: tl.constexpr = inner.dtype.element_ty
    out = gated(gate_sums, up_sums, dtype, EPILOGUE)
    tl.store(inner + entry.to(tl.int64) * N + n, out.to(dtype), mask=n < N)


@triton.jit
def _add_down(
    hidden, inner, ids, weights, weight, scales, zeros, N, K, ROW_BYTES, GROUPS,
    BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, TOP_K: tl.constexpr,
    KIND: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        wait_for_previous()
    row = tl.program_id(1)
    ids += row * TOP_K
    if tl.load(ids) < 0:  # a row has all its experts, or none
        return
    weights += row * TOP_K
    inner += row.to(tl.int64) * TOP_K * K
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = tl.minimum(n, N - 1)
    at = hidden + row.to(tl.int64) * N + n
    before = tl.load(at, mask=n < N, other=0.0).to(tl.float32)
    WIDTH: tl.constexpr = BK // 2 if KIND == INT4 else BK
    total = tl.zeros((BN, WIDTH), tl.float32)
    if STAGES == 0:
        for place in tl.static_range(TOP_K):
            rows = tl.load(ids + place) * N + inside
            share = tl.load(weights + place) + tl.zeros((BN,), tl.float32)
            if KIND >= 0 and GROUP == 0:
                share *= tl.load(scales + rows)
            for step in tl.static_range(STEPS):
                total += share[:, None] * _products(
                    weight, scales, zeros, inner + place * K, rows, step * BK, K, ROW_BYTES, GROUPS,
                    BK, KIND, SCALE_ROWS, GROUP, HAS_ZEROS, EVEN,
                )  # fmt: skip
    else:
        for turn in tl.range(0, TOP_K * STEPS, num_stages=STAGES):
            place = turn // STEPS
            rows = tl.load(ids + place) * N + inside
            share = tl.load(weights + place) + tl.zeros((BN,), tl.float32)
            if KIND >= 0 and GROUP == 0:
                share *= tl.load(scales + rows)
            total += share[:, None] * _products(
                weight, scales, zeros, inner + place * K, rows, turn % STEPS * BK, K, ROW_BYTES, GROUPS,
                BK, KIND, SCALE_ROWS, GROUP, HAS_ZEROS, EVEN,
            )  # fmt: skip
    dtype: tl.constexpr = hidden.dtype.element_ty
    after = before + tl.sum(total, 1).to(dtype).to(tl.float32)
    tl.store(at, after.to(dtype), mask=n < N)


def gate_up_tuning() -> GemvTuning:
    """The tuning of `gate_up_entries`: the best one of `bench.decode experts` on an H200 in bf16 and fp8."""
    return GemvTuning(rows=8, width=512, warps=4)


def down_tuning(weight: Weight, rows: int) -> GemvTuning:
    """The tuning of `add_down_entries` for `rows` rows, chosen like `gate_up_tuning`."""
    if rows > _FEW_ROWS:
        return GemvTuning(rows=16, width=256, warps=8)
    return GemvTuning(rows=4 if isinstance(weight, Tensor) else 8, width=1024, warps=4)


def gate_up_entries(
    inner: Tensor,
    x: Tensor,
    ids: Tensor,
    stack: WeightStack,
    gate: Epilogue,
    tuning: GemvTuning | None = None,
    *,
    early: bool = False,
) -> None:
    """x [R, K] by the experts of ids [R, k] int32, stack [E, 2 N, K] → inner [R · k, N], gated. Contiguous;
    of one dtype, or the stack in fewer bits. The rows of inner whose expert is -1 are not written. `early`:
    see `dependent_launch`. Raises ValueError for shapes and formats that do not fit."""
    (_, rows, k), n = stack.shape, inner.shape[1]
    if not gate.gated or x.shape != (len(ids), k) or inner.shape != (ids.numel(), n) or rows != 2 * n:
        raise ValueError(f"x {tuple(x.shape)}, inner {tuple(inner.shape)} and stack {stack.shape} do not fit")
    tuning = tuning or gate_up_tuning()
    _gate_up[(triton.cdiv(n, tuning.rows), ids.numel())](
        inner, x, ids, *_tensors(stack, inner, x, ids), n, k, *_strides(stack.weight), ids.shape[1],
        EPILOGUE=int(gate), EARLY=early, **_options(stack.weight, k, tuning), **dependent_launch(early),
    )  # fmt: skip


def add_down_entries(
    hidden: Tensor,
    inner: Tensor,
    ids: Tensor,
    weights: Tensor,
    stack: WeightStack,
    tuning: GemvTuning | None = None,
    *,
    early: bool = False,
) -> None:
    """inner [R · k, K] by the experts of ids [R, k] int32, stack [E, N, K], and by weights [R, k] float32:
    their sum over each row's entries, rounded, is added to hidden [R, N]. Contiguous; of one dtype, or the
    stack in fewer bits. A row of experts -1 stays as it is. `early`: see `dependent_launch`. Raises
    ValueError for shapes and formats that do not fit."""
    (_, n, k), (count, top_k) = stack.shape, ids.shape
    if weights.shape != ids.shape or inner.shape != (ids.numel(), k) or hidden.shape != (count, n):
        raise ValueError(
            f"inner {tuple(inner.shape)}, hidden {tuple(hidden.shape)} and stack {stack.shape} do not fit"
        )
    tuning = tuning or down_tuning(stack.weight, count)
    options = _options(stack.weight, k, tuning)
    unrolled = options["KIND"] != KINDS["int4"] and top_k * options["STEPS"] <= _MOST_UNROLLED
    _add_down[(triton.cdiv(n, tuning.rows), count)](
        hidden, inner, ids, weights, *_tensors(stack, hidden, inner, ids, weights), n, k,
        *_strides(stack.weight), TOP_K=top_k, EARLY=early, STAGES=0 if unrolled else _STAGES, **options,
        **dependent_launch(early),
    )  # fmt: skip


def _tensors(stack: WeightStack, *others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The stack's codes, scales and zeros; the weight itself for those that it has not."""
    weight = stack.weight
    parts = weight.tensors() if isinstance(weight, QuantizedWeight) else [weight]
    if not all(tensor.is_contiguous() for tensor in (*parts, *others)):
        raise ValueError("experts, their rows and ids must be contiguous")
    if isinstance(weight, Tensor):
        return weight, weight, weight
    check_fits(weight.format, stack.shape[1])
    return weight.codes, weight.scales, weight.scales if weight.zeros is None else weight.zeros


def _strides(weight: Weight) -> tuple[int, int]:
    """Elements of a row in memory, and its scales."""
    if isinstance(weight, Tensor):
        return weight.shape[1], 1
    return weight.codes[0].numel(), weight.scales.shape[1]


def _options(weight: Weight, k: int, tuning: GemvTuning) -> dict[str, Any]:
    """Constants of both kernels."""
    form = weight.format if isinstance(weight, QuantizedWeight) else None
    width, group = tuning.width, form.scale_columns if form else 0
    if form and form.codes == "fp8" and group:
        width = min(width, group)
    elif form and form.codes == "int4":
        width = max(width, INT4_SPAN)
    return {
        "BN": tuning.rows,
        "BK": width,
        "STEPS": triton.cdiv(k, width),
        "KIND": KINDS[form.codes] if form else _VALUES.value,
        "SCALE_ROWS": form.scale_rows if form else 1,
        "GROUP": group,
        "HAS_ZEROS": isinstance(weight, QuantizedWeight) and weight.zeros is not None,
        "EVEN": k % width == 0,
        "num_warps": tuning.warps,
    }
