"""A few rows times a weight matrix on the matrix units: W streams once, and everything else stays near.

    out = x · Wᵀ + bias                         PLAIN
    out = out + x · Wᵀ + bias                   RESIDUAL
    out = silu(x · Gateᵀ) · (x · Upᵀ)           SWIGLU, W = [Gate; Up]; GEGLU with gelu

W's rows take the side of the product that the units want long, so 16 rows of x cost no padding. K may be
split among programs; the last to arrive adds the parts up in their order, so a result does not
depend on who was fast. A row's result depends on the tiles (`SkinnyTuning`) and on nothing else: not on
how many rows there are, nor on its place among them.

Tiles of x have a power of two of rows. 96 rows are in two tiles, 64 and 32, side by side in one program,
which multiplies both by each tile of W: W is still read once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import ON_CHIP
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.gemm.gemv import gated
from baton.engine.kernels.gpu.gemm.split_space import SplitSpace


@triton.jit(do_not_specialize=["M"])
def _skinny(
    x,
    weight,
    bias,
    out,
    partial,
    arrived,
    M,
    N,
    K,
    BM: tl.constexpr,
    MORE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EPILOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """BM rows of x in one tile and, unless MORE is 0, the MORE rows after them in a second one."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows_tile = tl.program_id(2)
    n = tile * BN + tl.arange(0, BN)
    m = rows_tile * (BM + MORE) + tl.arange(0, BM)
    # Rows past the end are read from the last, and never stored: no mask on the way.
    n_safe = tl.minimum(n, N - 1).to(tl.int64)
    w_rows = weight + n_safe[:, None] * K
    x_rows = x + tl.minimum(m, M - 1)[None, :] * K
    per_split = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
    begin = split * per_split
    sums = tl.zeros((BN, BM), tl.float32)
    ups = tl.zeros((BN, BM), tl.float32)
    if MORE > 0:
        more_m = rows_tile * (BM + MORE) + BM + tl.arange(0, MORE)
        more_rows = x + tl.minimum(more_m, M - 1)[None, :] * K
        more_sums = tl.zeros((BN, MORE), tl.float32)
        more_ups = tl.zeros((BN, MORE), tl.float32)
    for start in tl.range(begin, tl.minimum(begin + per_split, K), BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        w = _load(w_rows, k[None, :], K, EVEN, UPCAST)
        xs = _load(x_rows, k[:, None], K, EVEN, UPCAST)
        sums = tl.dot(w, xs, sums, input_precision="ieee")
        if MORE > 0:
            more_xs = _load(more_rows, k[:, None], K, EVEN, UPCAST)
            more_sums = tl.dot(w, more_xs, more_sums, input_precision="ieee")
        if EPILOGUE >= 2:
            u = _load(w_rows + N.to(tl.int64) * K, k[None, :], K, EVEN, UPCAST)
            ups = tl.dot(u, xs, ups, input_precision="ieee")
            if MORE > 0:
                more_ups = tl.dot(u, more_xs, more_ups, input_precision="ieee")

    finish_tile(
        sums, ups, bias, out, partial, arrived, n, m, tile, rows_tile, split, M, N, BM, BN, SPLITS, EPILOGUE,
        HAS_BIAS,
    )  # fmt: skip
    if MORE > 0:
        # The second tiles' parts and meeting places lie after those of all the first ones.
        tiles = tl.num_programs(0) * tl.num_programs(2)
        halves: tl.constexpr = 2 if EPILOGUE >= 2 else 1
        if SPLITS > 1:
            partial += tiles.to(tl.int64) * (SPLITS * halves * BN * BM)
            arrived += tiles
        finish_tile(
            more_sums, more_ups, bias, out, partial, arrived, n, more_m, tile, rows_tile, split, M, N, MORE,
            BN, SPLITS, EPILOGUE, HAS_BIAS,
        )  # fmt: skip


@triton.jit
def _load(rows, k, K, EVEN: tl.constexpr, UPCAST: tl.constexpr):
    """A tile: the columns k, along their side of it, of `rows`, pointers along the other."""
    values = tl.load(rows + k) if EVEN else tl.load(rows + k, mask=k < K, other=0.0)
    if UPCAST:
        values = values.to(tl.float32)
    return values


@triton.jit
def finish_tile(
    sums, ups, bias, out, partial, arrived, n, m, tile, rows_tile, split, M, N,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Stores a tile's sums; those of a split go to `partial`, and the program that arrives last adds them
    up."""
    if SPLITS == 1:
        _store(sums, ups, bias, out, n, m, M, N, EPILOGUE, HAS_BIAS)
    else:
        tiles = tl.num_programs(0) * tl.num_programs(2)
        which = rows_tile * tl.num_programs(0) + tile
        halves: tl.constexpr = 2 if EPILOGUE >= 2 else 1
        inside = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        mine = partial + (split * tiles + which).to(tl.int64) * (halves * BN * BM) + inside
        tl.store(mine, sums)
        if EPILOGUE >= 2:
            tl.store(mine + BN * BM, ups)
        if ON_CHIP:
            tl.debug_barrier()
        if tl.atomic_add(arrived + which, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrived + which, 0)
            sums = tl.zeros((BN, BM), tl.float32)
            ups = tl.zeros((BN, BM), tl.float32)
            for part in tl.static_range(SPLITS):
                theirs = partial + (part * tiles + which).to(tl.int64) * (halves * BN * BM) + inside
                # Past the first-level cache: another multiprocessor has written them.
                sums += tl.load(theirs, cache_modifier=".cg")
                if EPILOGUE >= 2:
                    ups += tl.load(theirs + BN * BM, cache_modifier=".cg")
            _store(sums, ups, bias, out, n, m, M, N, EPILOGUE, HAS_BIAS)


@triton.jit
def _store(sums, ups, bias, out, n, m, M, N, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr):
    dtype: tl.constexpr = out.dtype.element_ty
    mask = (n < N)[:, None] & (m < M)[None, :]
    place = out + m[None, :].to(tl.int64) * N + n[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if EPILOGUE == 1:
        sums += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if EPILOGUE >= 2:
        if HAS_BIAS:
            ups += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        sums = gated(sums, ups, dtype, EPILOGUE)
    tl.store(place, sums.to(dtype), mask=mask)


@dataclass(frozen=True, slots=True)
class SkinnyTuning:
    """Tiles: `rows` of x, `columns` of W's rows, `width` along K; `splits` of K.

    `rows` is a power of two, or for `skinny_linear` the sum of two, 16 at least: 96 = 64 + 32.
    """

    rows: int = 16
    columns: int = 64
    width: int = 128
    splits: int = 1
    stages: int = 4
    warps: int = 4

    @property
    def x_tiles(self) -> tuple[int, int]:
        """Rows of the two tiles of x, the first of the largest power of two; 0 where there is no second."""
        first = 1 << (self.rows.bit_length() - 1)
        return first, self.rows - first


def split_space_needed(m: int, n: int, tuning: SkinnyTuning, epilogue: Epilogue) -> tuple[int, int]:
    """Elements and tiles that `skinny_linear` takes of a SplitSpace for out [m, n]; (0, 0) without splits."""
    if tuning.splits == 1:
        return 0, 0
    tiles = triton.cdiv(n, tuning.columns) * triton.cdiv(m, tuning.rows)
    halves = 2 if epilogue.gated else 1
    meetings = 2 * tiles if tuning.x_tiles[1] else tiles
    return tiles * tuning.splits * tuning.columns * tuning.rows * halves, meetings


def skinny_linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    epilogue: Epilogue = Epilogue.PLAIN,
    tuning: SkinnyTuning = SkinnyTuning(),
    space: SplitSpace | None = None,
) -> None:
    """Multiplies few rows: x [M, K], weight [N, K] (SWIGLU: [2 N, K]), out [M, N], of one dtype, contiguous.

    With splits, `space` holds at least `split_space_needed`. Raises ValueError for what does not fit.
    """
    n = weight.shape[0] // 2 if epilogue.gated else weight.shape[0]
    (m, k), (first, second) = x.shape, tuning.x_tiles
    if first < 16 or second & (second - 1) or 0 < second < 16:
        raise ValueError(f"{tuning.rows} rows are no tile of x, nor two")
    if weight.shape[1] != k or tuple(out.shape) != (m, n):
        raise ValueError(f"x {tuple(x.shape)} and out {tuple(out.shape)} do not fit {tuple(weight.shape)}")
    if not (x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()):
        raise ValueError("x, weight and out must be contiguous")
    elements, tiles = split_space_needed(m, n, tuning, epilogue)
    if tiles and (space is None or not space.holds(elements, tiles)):
        raise ValueError(f"{tuning.splits} splits need a space of {elements} elements and {tiles} tiles")
    _skinny[(triton.cdiv(n, tuning.columns), tuning.splits, triton.cdiv(m, tuning.rows))](
        x,
        weight,
        x if bias is None else bias,
        out,
        x if space is None else space.partial,
        x if space is None else space.arrived,
        m,
        n,
        k,
        BM=first,
        MORE=second,
        BN=tuning.columns,
        BK=tuning.width,
        SPLITS=tuning.splits,
        STAGES=tuning.stages,
        EPILOGUE=int(epilogue),
        HAS_BIAS=bias is not None,
        EVEN=k % tuning.width == 0,
        UPCAST=x.dtype == torch.float32 or not ON_CHIP.value,
        num_warps=tuning.warps,
    )
