"""A few rows times a weight matrix of int4, on Hopper, in CUDA C++: W goes from memory straight to registers.

    out = epilogue(x · Wᵀ + bias), the epilogues of `skinny_linear`

A program in Triton moves a tile of W through shared memory to registers, where it becomes bfloat16 and is put
into the matrix units' order, which takes longer than W takes from memory. Here (`streamed_product.cu`) a
thread takes 16 bytes of a row as they lie in memory, and the units sum over K in the order that follows from
that: nothing is moved. Codes become bfloat16 exactly; their scales multiply sums, in float32.

The kernel may begin before the one in front of it has ended: it asks for its first part of W, and then waits
for x.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from baton.device.cuda_source import CudaFunction, cached_source
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.gemm.split_space import SplitSpace
from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
from baton.engine.kernels.weight_format import WeightFormat

_SOURCE = Path(__file__).with_suffix(".cu")
_SHARED_BYTES = 227 * 1024
# Columns of W in 64 bytes.
_PIECE = 128


@dataclass(frozen=True, slots=True)
class StreamedTuning:
    """A block's part of the product: `rows` of x, a multiple of 8; `row_tiles` of 16 results for each of
    `row_warps`; `depth_warps` share the columns of K, of which each takes `pieces` of 64 bytes a step.
    `splits` of K among blocks; steps of W in registers, and of x in shared memory."""

    rows: int = 16
    row_tiles: int = 1
    row_warps: int = 4
    depth_warps: int = 1
    pieces: int = 1
    splits: int = 1
    w_steps: int = 3
    x_stages: int = 3

    @property
    def columns(self) -> int:
        """Results of a row that a block computes."""
        return 16 * self.row_tiles * self.row_warps

    @property
    def can_copy(self) -> bool:
        """True if a block's threads can copy x, whose rows are a multiple of eight: a thread all even rows or
        all odd ones."""
        copied_rows, rest = divmod(32 * self.row_warps, self.pieces * _PIECE // 8)
        return self.rows % 8 == 0 and rest == 0 and (copied_rows % 2 == 0 or copied_rows >= self.rows)

    def shared_bytes(self, epilogue: Epilogue) -> int:
        """Shared memory of a block: x in flight, and afterwards the warps' sums."""
        width = self.pieces * _PIECE
        halves = 2 if epilogue.gated else 1
        x = self.x_stages * self.depth_warps * self.rows * width * 2
        return max(x, self.depth_warps * self.rows * (self.columns * halves + 4) * 4)


def streamed_fits(weight: Weight, activations: torch.dtype) -> TypeGuard[QuantizedWeight]:
    """True if the kernel is for x of this dtype, which is bfloat16, times this weight: codes of int4 with
    scales of rows, or of groups of columns that are whole pieces. Rows of W are a multiple of 32."""
    if activations is not torch.bfloat16 or not isinstance(weight, QuantizedWeight):
        return False
    (rows, columns), weight_format = weight.shape, weight.format
    by_pieces = weight_format.codes == "int4" and weight_format.scale_columns % _PIECE == 0
    # Places in W are 32 bits wide.
    return by_pieces and rows % 32 == 0 and columns % 8 == 0 and weight.nbytes < 1 << 32


def streamed_space_needed(m: int, n: int, tuning: StreamedTuning, epilogue: Epilogue) -> tuple[int, int]:
    """Elements and tiles that `streamed_product` takes of a SplitSpace for out [m, n]; (0, 0) without
    splits."""
    if tuning.splits == 1:
        return 0, 0
    halves, blocks = 2 if epilogue.gated else 1, _blocks(m, n, tuning)
    return blocks * tuning.splits * halves * tuning.rows * tuning.columns, blocks


def _blocks(m: int, n: int, tuning: StreamedTuning) -> int:
    return -(-n // tuning.columns) * -(-m // tuning.rows)


def streamed_product(
    out: Tensor,
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    epilogue: Epilogue,
    tuning: StreamedTuning,
    space: SplitSpace | None = None,
) -> None:
    """Multiplies few rows by int4, which is streamed: x [M, K] bfloat16, weight [N, K] int4 (gated: [2 N, K])
    that `streamed_fits`, out [M, N] bfloat16, all contiguous.

    With splits, `space` holds at least `streamed_space_needed`; products that share a space follow one
    another on one stream. `out` may be what the preceding kernel reads or writes, not so the weights. Raises
    ValueError for what does not fit.
    """
    (m, k), n = x.shape, weight.shape[0] // (2 if epilogue.gated else 1)
    if weight.shape[1] != k or tuple(out.shape) != (m, n) or not streamed_fits(weight, x.dtype) or n % 16:
        raise ValueError(f"x {tuple(x.shape)} and out {tuple(out.shape)} do not fit {tuple(weight.shape)}")
    if not (x.is_contiguous() and weight.codes.is_contiguous() and out.is_contiguous()):
        raise ValueError("x, codes and out must be contiguous")
    if out.dtype is not x.dtype:
        raise ValueError(f"x is {x.dtype}, out {out.dtype}")
    if not tuning.can_copy:
        raise ValueError(f"{tuning}: a block cannot copy such rows of x")
    if tuning.shared_bytes(epilogue) > _SHARED_BYTES:
        raise ValueError(f"{tuning} takes more shared memory than a block may have")
    elements, tiles = streamed_space_needed(m, n, tuning, epilogue)
    if tiles and (space is None or not space.holds(elements, tiles)):
        raise ValueError(f"{tuning.splits} splits need a space of {elements} elements and {tiles} tiles")
    function = streamed_function(tuning, epilogue, weight.format, bias is not None, x.device.index)
    function.launch(
        _blocks(m, n, tuning) * tuning.splits,
        32 * tuning.row_warps * tuning.depth_warps,
        (
            x, weight.codes, weight.scales, weight.scales if weight.zeros is None else weight.zeros,
            out if bias is None else bias, out,
            out if space is None else space.partial, out if space is None else space.arrived,
            m, n, k, weight.scales.shape[1],
        ),
    )  # fmt: skip


@cache
def streamed_function(
    tuning: StreamedTuning, epilogue: Epilogue, weight_format: WeightFormat, bias: bool, device: int
) -> CudaFunction:
    code = cached_source(streamed_source(tuning, epilogue, weight_format, bias), "sm_90a")
    with torch.cuda.device(device):
        return CudaFunction(code, "streamed_product", tuning.shared_bytes(epilogue))


def streamed_source(
    tuning: StreamedTuning, epilogue: Epilogue, weight_format: WeightFormat, bias: bool
) -> str:
    """The kernel's source for a product."""
    defines = {
        "X_EIGHTS": tuning.rows // 8,
        "ROW_TILES": tuning.row_tiles,
        "ROW_WARPS": tuning.row_warps,
        "DEPTH_WARPS": tuning.depth_warps,
        "PIECES": tuning.pieces,
        "SPLITS": tuning.splits,
        "W_STEPS": tuning.w_steps,
        "X_STAGES": tuning.x_stages,
        "EPILOGUE": int(epilogue),
        "GROUP_PIECES": weight_format.scale_columns // _PIECE,
        "SCALE_ROWS": weight_format.scale_rows,
        "HAS_ZEROS": int(weight_format.zeros),
        "HAS_BIAS": int(bias),
    }
    return "".join(f"#define {name} {value}\n" for name, value in defines.items()) + _SOURCE.read_text()
