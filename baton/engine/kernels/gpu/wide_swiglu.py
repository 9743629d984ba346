"""The widest product of a step for some hundreds of rows, on Hopper: CUDA C++, where Triton has no words.

    out = silu(x · Gateᵀ) · (x · Upᵀ), W = [Gate; Up]

From about 160 rows on the units have as much to do as memory, and what a tile of one multiprocessor reads of
the cache in between is more than that gives. `wide_swiglu.cu` has two multiprocessors share every tile of W
(clusters and multicast), which Triton cannot say. 112 columns a tile make of 8B's 14,336 a number that fills
132 multiprocessors twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from baton.device.cuda_source import CudaFunction, can_compile, compile_source, tensor_map

_SOURCE = Path(__file__).with_suffix(".cu")
_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}
_ROWS, _DEPTH, _THREADS = 128, 64, 384
_SHARED_BYTES = 227 * 1024
# Barriers, and what is left before the first tile's place.
_OTHER_BYTES = 1024 + 512


@dataclass(frozen=True, slots=True)
class WideTuning:
    """Tiles: `columns` of Gate and as many of Up, a multiple of 8; tiles of x and of W on their way."""

    columns: int = 112
    x_stages: int = 3
    w_stages: int = 6

    @property
    def tile_bytes(self) -> int:
        """Of shared memory."""
        return 2 * _DEPTH * (self.x_stages * _ROWS + self.w_stages * 2 * self.columns)


def runs_here() -> bool:
    """Whether the current device is one that it is for, and can be compiled for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and can_compile()


def wide_swiglu(out: Tensor, x: Tensor, weight: Tensor, tuning: WideTuning = WideTuning()) -> None:
    """x [M, K], weight [2 N, K], out [M, N], all bfloat16 or all float16, contiguous; K a multiple of 8.

    N is even. The kernel may begin before the one in front of it has ended, and waits for x; so `out` may be
    what that one reads or writes, not so the weights. Raises ValueError for what does not fit.
    """
    m, k = x.shape
    n = weight.shape[0] // 2
    if tuple(weight.shape) != (2 * n, k) or tuple(out.shape) != (m, n) or k % 8 or n % 2:
        raise ValueError(f"x {tuple(x.shape)} and out {tuple(out.shape)} do not fit {tuple(weight.shape)}")
    kinds = {t.dtype for t in (x, weight, out)}
    if x.dtype not in _KINDS or len(kinds) > 1:
        raise ValueError(f"dtypes {kinds}, not bfloat16 or float16 alone")
    if not (x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()):
        raise ValueError("x, weight and out must be contiguous")
    if tuning.columns % 8 or not 8 <= tuning.columns <= 128:
        raise ValueError(f"tiles of {tuning.columns} columns")
    if tuning.tile_bytes + _OTHER_BYTES > _SHARED_BYTES:
        raise ValueError(f"{tuning} takes {tuning.tile_bytes} bytes of shared memory")
    units = -(-n // tuning.columns) * -(-m // (2 * _ROWS))
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    # Rows of the buffer behind x are read and never told of: to be given zeros takes longer.
    behind = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()) // k
    x_map = tensor_map(x, min(behind, -(-m // _ROWS) * _ROWS), (_ROWS, _DEPTH))
    w_map = tensor_map(weight, 2 * n, (tuning.columns, _DEPTH))
    function = _function(tuning, x.dtype, x.device.index)
    function.launch(2 * min(units, multiprocessors // 2), _THREADS, (x_map, w_map, out, m, n, k))


@cache
def _function(tuning: WideTuning, dtype: torch.dtype, device: int) -> CudaFunction:
    code = compile_source(_source(tuning, dtype), "sm_90a")
    with torch.cuda.device(device):
        return CudaFunction(code, "wide_swiglu", tuning.tile_bytes + 1024)


def _source(tuning: WideTuning, dtype: torch.dtype) -> str:
    defines = {
        "COLUMNS": tuning.columns,
        "X_STAGES": tuning.x_stages,
        "W_STAGES": tuning.w_stages,
        "KIND": f'"{_KINDS[dtype]}"',
    }
    head = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return head + _SOURCE.read_text().replace("// MULTIPLY", _multiply(tuning.columns))


def _multiply(columns: int) -> str:
    """The matrix units' instruction names each register of its sums: 64 rows by twice the columns are
    `columns` of them a thread."""
    names = ", ".join(f"%{i}" for i in range(columns))
    sums = ", ".join(f'"+f"(d[{i}])' for i in range(columns))
    return f"""
__device__ __forceinline__ void multiply(float (&d)[{columns}], u64 a, u64 b, int add) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{columns + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{2 * columns}k16.f32." KIND "." KIND
      " {{{names}}}, %{columns}, %{columns + 1}, p, 1, 1, 0, 0;\\n}}"
      : {sums} : "l"(a), "l"(b), "r"(add));
}}
"""
