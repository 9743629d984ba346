"""A matrix product for some hundreds of rows, on Hopper, in CUDA C++ (docs/decisions/0016).

    out = x · Wᵀ                                PLAIN
    out = out + x · Wᵀ                          RESIDUAL
    out = silu(x · Gateᵀ) · (x · Upᵀ)           SWIGLU, W = [Gate; Up]

From about 160 rows on, the tensor cores take as long as memory does, and what the tiles of single
multiprocessors read from L2 is more than it delivers. In `wide_product.cu` two multiprocessors share every
tile of W (clusters and multicast), which Triton cannot express. With 112 columns of gate and of up in a tile,
the 14,336 columns of an 8B model fill 132 multiprocessors twice.

Where columns are few, K is split among clusters. Each writes its partial sums of a tile, and the one that
finishes last adds them up, in the order of the splits whichever it is. No cluster waits for another, so a
product ends however many multiprocessors other kernels occupy. Down of an 8B model (256 rows, N 4,096, K
14,336) reads 117 MB of memory, 40 µs, and keeps the tensor cores busy for 36 to 43. L2 delivers 5.5 to 6.4 MB
per µs: W is read once, x once for each tile of columns, and partial sums are written by all S splits and read
of S - 1: 4.2 MB · (2 S - 1). Estimated:

    columns, splits     clusters of 66      W and x     parts
    128, 2              64                  352 MB      13 MB
    192, 3              66                  279         21
    256, 4              64                  235         29

With up to 128 rows one multiprocessor of such a pair would have none. There `x_sharers` of them, 2 or 4,
compute different columns of the same rows and share every tile of x. L2 then delivers W once, x once for each
`x_sharers` tiles of columns, and partial sums as above, of which the last split of a tile takes S - 1 parts.
An 8B model at 128 rows, with what L2 would deliver without sharing and what the last split takes:

    product     columns, splits, sharers    multiprocessors     L2, MB          last, KB
    gate_up     112, 1, 2                   128                 302 (369)       0
    gate_up     112, 1, 4                   128                 268             0
    down        128, 4, 2                   128                 191 (250)       192
    down        128, 4, 4                   128                 161             192
    down        64, 2, 4                    128                 182 (359)       32
    qkv         96, 2, 2                    128                 93 (127)        48
    qkv         96, 2, 4                    128                 77              48
    output      64, 2, 2                    128                 73 (107)        32
    output      64, 2, 4                    128                 57              32
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from baton.device.cuda_source import CudaFunction, cached_source, can_compile, tensor_map
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.gemm.split_space import SplitSpace

_SOURCE = Path(__file__).with_suffix(".cu")
_INSTRUCTIONS = Path(__file__).with_name("hopper_instructions.cu")
_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}
_ROWS, _DEPTH, _THREADS = 128, 64, 384
_MOST_W_ROWS = 256
_X_SHARERS = (1, 2, 4)
_GROUPS = 2  # of a multiprocessor's 128 rows, each of which adds up its own
_SHARED_BYTES = 227 * 1024
# Barriers, and what is left before the first tile's place.
_OTHER_BYTES = 1024 + 512


EPILOGUES = (Epilogue.PLAIN, Epilogue.RESIDUAL, Epilogue.SWIGLU)


@dataclass(frozen=True, slots=True)
class WideTuning:
    """Tiles: `columns` of results; tiles of x and of W on their way, 2 at least; `splits` of K; `x_sharers`
    multiprocessors, 2 or 4, that share tiles of x and have other columns each; 1: two share tiles of W and
    have other rows each.

    A tile's rows of W are as many as its columns, twice as many of SwiGLU (Gate, Up): a multiple of 16, at
    most 256.
    """

    columns: int = 112
    x_stages: int = 3
    w_stages: int = 6
    splits: int = 1
    x_sharers: int = 1

    @property
    def cluster(self) -> int:
        """Number of multiprocessors in a cluster."""
        return 2 if self.x_sharers == 1 else self.x_sharers

    @property
    def unit(self) -> tuple[int, int]:
        """Rows and columns of results that a cluster computes at a time."""
        if self.x_sharers == 1:
            return self.cluster * _ROWS, self.columns
        return _ROWS, self.cluster * self.columns

    def w_rows(self, epilogue: Epilogue) -> int:
        """Rows of W that a tile takes."""
        return self.columns * (2 if epilogue is Epilogue.SWIGLU else 1)

    def tile_bytes(self, epilogue: Epilogue) -> int:
        """Bytes of shared memory that a tile takes."""
        return 2 * _DEPTH * (self.x_stages * _ROWS + self.w_stages * self.w_rows(epilogue))


def runs_here() -> bool:
    """True if the current device is of the kind that the kernel is for, and the kernel can be compiled."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and can_compile()


def wide_space_needed(m: int, n: int, tuning: WideTuning) -> tuple[int, int]:
    """Elements and tiles that `wide_product` takes of a SplitSpace for out [m, n]; (0, 0) without splits."""
    if tuning.splits == 1:
        return 0, 0
    units = _units(m, n, tuning)
    rows, columns = tuning.unit
    return units * tuning.splits * rows * columns, units * tuning.cluster * _GROUPS


def wide_product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    epilogue: Epilogue = Epilogue.PLAIN,
    tuning: WideTuning = WideTuning(),
    space: SplitSpace | None = None,
) -> None:
    """Multiplies many rows: x [M, K], weight [N, K] (SWIGLU: [2 N, K]), out [M, N], all bfloat16 or all
    float16, contiguous.

    K is a multiple of 8, N is even. With splits, `space` holds at least `wide_space_needed`; products that
    share a space follow one another on one stream. The kernel may begin before the one in front of it has
    ended, and waits for x; so `out` may be what that one reads or writes, not so the weights. Raises
    ValueError for what does not fit.
    """
    (m, k), n = x.shape, weight.shape[0]
    if epilogue is Epilogue.SWIGLU:
        n //= 2
    _refuse_tensors(out, x, weight, (m, n, k), epilogue)
    _refuse_tuning(tuning, epilogue, k)
    elements, tiles = wide_space_needed(m, n, tuning)
    if tiles and (space is None or not space.holds(elements, tiles)):
        raise ValueError(f"{tuning.splits} splits need a space of {elements} elements and {tiles} tiles")
    clusters = multiprocessors(x.device) // tuning.cluster
    items = _units(m, n, tuning) * tuning.splits
    # Rows of the buffer behind x are read as they are, since zeroing them takes longer.
    behind = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()) // k
    x_map = tensor_map(x, min(behind, -(-m // _ROWS) * _ROWS), (_ROWS // tuning.x_sharers, _DEPTH))
    w_map = tensor_map(weight, weight.shape[0], (tuning.w_rows(epilogue) // 2, _DEPTH))
    partial, arrived = (out, out) if space is None else (space.partial, space.arrived)
    function = wide_function(tuning, epilogue, x.dtype, x.device.index)
    arguments = (x_map, w_map, out, partial, arrived, m, n, k)
    function.launch(tuning.cluster * min(items, clusters), _THREADS, arguments)


def _units(m: int, n: int, tuning: WideTuning) -> int:
    rows, columns = tuning.unit
    return -(-n // columns) * -(-m // rows)


def multiprocessors(device: torch.device) -> int:
    """Number of the device's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _refuse_tensors(
    out: Tensor, x: Tensor, weight: Tensor, shape: tuple[int, int, int], epilogue: Epilogue
) -> None:
    m, n, k = shape
    rows = 2 * n if epilogue is Epilogue.SWIGLU else n
    if tuple(weight.shape) != (rows, k) or tuple(out.shape) != (m, n) or k % 8 or n % 2:
        raise ValueError(f"x {tuple(x.shape)} and out {tuple(out.shape)} do not fit {tuple(weight.shape)}")
    kinds = {t.dtype for t in (x, weight, out)}
    if x.dtype not in _KINDS or len(kinds) > 1:
        raise ValueError(f"dtypes {kinds}, not bfloat16 or float16 alone")
    if not (x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()):
        raise ValueError("x, weight and out must be contiguous")


def _refuse_tuning(tuning: WideTuning, epilogue: Epilogue, k: int) -> None:
    if epilogue not in EPILOGUES:
        raise ValueError(f"there is no code for the epilogue {epilogue.name}")
    w_rows = tuning.w_rows(epilogue)
    if w_rows % 16 or tuning.columns % 8 or not 16 <= w_rows <= _MOST_W_ROWS:
        raise ValueError(f"tiles of {tuning.columns} columns")
    if tuning.x_sharers not in _X_SHARERS or min(tuning.x_stages, tuning.w_stages) < 2:
        raise ValueError(f"{tuning}: x_sharers 1, 2 or 4, and two stages at least")
    if not 1 <= tuning.splits <= -(-k // _DEPTH) or (tuning.splits > 1 and epilogue is Epilogue.SWIGLU):
        raise ValueError(f"{tuning.splits} splits of {k}, {epilogue.name}")
    if tuning.tile_bytes(epilogue) + _OTHER_BYTES > _SHARED_BYTES:
        raise ValueError(f"{tuning} takes {tuning.tile_bytes(epilogue)} bytes of shared memory")


@cache
def wide_function(tuning: WideTuning, epilogue: Epilogue, dtype: torch.dtype, device: int) -> CudaFunction:
    """The compiled kernel, loaded on a device."""
    code = cached_source(_instructions(tuning, epilogue, dtype) + wide_source(tuning, epilogue), "sm_90a")
    with torch.cuda.device(device):
        return CudaFunction(code, "wide_product", tuning.tile_bytes(epilogue) + 1024)


def wide_source(tuning: WideTuning, epilogue: Epilogue) -> str:
    """The kernel's source, without the instructions that it is written in."""
    defines = {
        "COLUMNS": tuning.columns,
        "EPILOGUE": int(epilogue),
        "SPLITS": tuning.splits,
        "X_STAGES": tuning.x_stages,
        "W_STAGES": tuning.w_stages,
        "X_SHARERS": tuning.x_sharers,
    }
    return "".join(f"#define {name} {value}\n" for name, value in defines.items()) + _SOURCE.read_text()


def _instructions(tuning: WideTuning, epilogue: Epilogue, dtype: torch.dtype) -> str:
    head = f'#define KIND "{_KINDS[dtype]}"\n'
    return head + _INSTRUCTIONS.read_text() + _multiply(tuning.w_rows(epilogue))


def _multiply(w_rows: int) -> str:
    """The matrix units' instruction names each register of its sums: 64 rows by `w_rows` are half as many a
    thread."""
    count = w_rows // 2
    names = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void multiply(float (&d)[{count}], u64 a, u64 b, int add) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{w_rows}k16.f32." KIND "." KIND
      " {{{names}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}"
      : {sums} : "l"(a), "l"(b), "r"(add));
}}
"""
