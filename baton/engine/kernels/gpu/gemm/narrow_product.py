"""A matrix product for 2 to 128 rows, on Hopper, in CUDA C++ (docs/decisions/0038).

    out = x · Wᵀ                                PLAIN
    out = out + x · Wᵀ                          RESIDUAL
    out = silu(x · Gateᵀ) · (x · Upᵀ)           SWIGLU, W = [Gate; Up]

Such a product is bound by the bytes of W. The matrix units take W from shared memory as their left operand
(`wgmma`, 64 rows of W by any multiple of eight rows of x), where Triton has tiles of x of a power of two
rows, and moves fragments of W through registers. Blocks of a cluster divide K, and add up their sums in
shared memory, each some rows of them and in the order of the blocks, so a result depends on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from baton.device.cuda_source import CudaFunction, cached_source, tensor_map
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.gemm.wide_product import EPILOGUES, KINDS, multiply_source, refuse_tensors

_SOURCE = Path(__file__).with_suffix(".cu")
_DEPTH, _SIDE = 64, 64
_MOST_ROWS, _MOST_GROUPS, _MOST_SPLITS = 128, 4, 8
_SHARED_BYTES = 227 * 1024
# Barriers, and what is left before the first tile's place.
_OTHER_BYTES = 1024 + 512


@dataclass(frozen=True, slots=True)
class NarrowTuning:
    """`rows` of x in a tile, a multiple of 8; `groups` of four warps, each with `halves` (1, or 2 as SwiGLU
    needs) tiles of 64 rows of W; `splits` of K; `stages`: tiles on their way."""

    rows: int = 48
    groups: int = 2
    halves: int = 2
    splits: int = 1
    stages: int = 5

    @property
    def w_rows(self) -> int:
        """Rows of W that a block takes."""
        return _SIDE * self.groups * self.halves

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory of all stages."""
        return 2 * _DEPTH * self.stages * (self.w_rows + self.rows)

    @property
    def fits(self) -> bool:
        """Whether a multiprocessor has room for a block, and its stages for its sums."""
        room = self.stage_bytes + _OTHER_BYTES <= _SHARED_BYTES
        return room and 4 * self.w_rows * self.rows <= self.stage_bytes


def narrow_product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    epilogue: Epilogue = Epilogue.PLAIN,
    tuning: NarrowTuning = NarrowTuning(),
) -> None:
    """x [M, K], weight [N, K] (SWIGLU: [2 N, K]), out [M, N], all bfloat16 or all float16, contiguous.

    K is a multiple of 8, N is even. The kernel may begin before the one in front of it has ended, and waits
    for x; so `out` may be what that one reads or writes, not so the weights. Raises ValueError for what does
    not fit.
    """
    (m, k), n = x.shape, weight.shape[0]
    if epilogue is Epilogue.SWIGLU:
        n //= 2
    refuse_tensors(out, x, weight, (m, n, k), epilogue)
    _refuse_tuning(tuning, epilogue, k)
    columns = tuning.w_rows // (2 if epilogue is Epilogue.SWIGLU else 1)
    units = -(-n // columns) * -(-m // tuning.rows)
    # Rows of the buffer behind x are read as they are, since zeroing them takes longer.
    behind = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()) // k
    x_map = tensor_map(x, min(behind, -(-m // tuning.rows) * tuning.rows), (tuning.rows, _DEPTH))
    w_map = tensor_map(weight, weight.shape[0], (_SIDE * tuning.groups, _DEPTH))
    function = _function(tuning, epilogue, x.dtype, x.device.index)
    function.launch(units * tuning.splits, 128 * tuning.groups + 32, (x_map, w_map, out, m, n, k))


def _refuse_tuning(tuning: NarrowTuning, epilogue: Epilogue, k: int) -> None:
    if epilogue not in EPILOGUES:
        raise ValueError(f"there is no code for the epilogue {epilogue.name}")
    if tuning.rows % 8 or not 8 <= tuning.rows <= _MOST_ROWS:
        raise ValueError(f"tiles of {tuning.rows} rows")
    halves = (2,) if epilogue is Epilogue.SWIGLU else (1, 2)
    if not 1 <= tuning.groups <= _MOST_GROUPS or tuning.halves not in halves:
        raise ValueError(f"{tuning.groups} groups of {tuning.halves} tiles of W, {epilogue.name}")
    if not 1 <= tuning.splits <= min(_MOST_SPLITS, -(-k // _DEPTH)):
        raise ValueError(f"{tuning.splits} splits of {k}")
    if tuning.stages < 2 or not tuning.fits:
        raise ValueError(f"{tuning} takes {tuning.stage_bytes} bytes of shared memory")


@cache
def _function(tuning: NarrowTuning, epilogue: Epilogue, dtype: torch.dtype, device: int) -> CudaFunction:
    code = cached_source(narrow_source(tuning, epilogue, dtype), "sm_90a")
    with torch.cuda.device(device):
        return CudaFunction(code, "narrow_product", tuning.stage_bytes + 1024)


def narrow_source(tuning: NarrowTuning, epilogue: Epilogue, dtype: torch.dtype) -> str:
    """The source of one kernel."""
    defines = {
        "ROWS": tuning.rows,
        "GROUPS": tuning.groups,
        "HALVES": tuning.halves,
        "SPLITS": tuning.splits,
        "STAGES": tuning.stages,
        "EPILOGUE": int(epilogue),
        "KIND": f'"{KINDS[dtype]}"',
    }
    head = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return head + _SOURCE.read_text().replace("// MULTIPLY", multiply_source(tuning.rows))
