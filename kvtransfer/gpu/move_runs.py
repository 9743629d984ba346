"""Copies runs of words, converts them on the way, and sums what travels: one pass, one kernel.

Some programs share the words of a run, each a tile of `_WORDS` at a time. Sums are of products modulo 2^64,
so programs may add theirs to a piece's in any order (`kvtransfer.checksum`). bfloat16 is taken for the upper
half of a float32, by its bits.

A move is a guest: its programs are few (`programs`), so that whoever else has work for the GPU finds
multiprocessors free at any moment, and each has several loads under way.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.device.cuda_runtime import CudaError, cuda_runtime
from baton.device.link_device import Kernel

_LOG = logging.getLogger(__name__)

_WORDS = 4096
_WARPS = 8
# Of all runs together, unless there are more runs: less than half of an H100's multiprocessors.
_PROGRAMS = 64


@triton.jit
def _splitmix64(x):
    z = x + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _half_to_half(bits, FROM_BFLOAT: tl.constexpr):
    """16 bits of one format, in an int32, to those of the other, rounded to nearest even."""
    if FROM_BFLOAT:
        value = (bits << 16).to(tl.float32, bitcast=True)
        return value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    wide = value.to(tl.uint32, bitcast=True)
    rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    return tl.where(value != value, (wide >> 16) | 0x40, rounded).to(tl.int32)


@triton.jit
def _move_runs(source, destination, runs, sums, CONVERT: tl.constexpr, FROM_BFLOAT: tl.constexpr,
               SUM_SOURCE: tl.constexpr, ALIGNED: tl.constexpr, ROW: tl.constexpr,
               WORDS: tl.constexpr):  # fmt: skip
    run = runs + tl.program_id(0) * ROW
    begins, goes_to, length = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    if ALIGNED:  # accesses of 16 bytes
        begins, goes_to, length = begins // 4 * 4, goes_to // 4 * 4, length // 4 * 4
    piece, place = tl.load(run + 3), tl.load(run + 4)
    total = tl.zeros([WORDS], dtype=tl.int64)
    for tile in range(tl.program_id(1), tl.cdiv(length, WORDS).to(tl.int32), tl.num_programs(1)):
        at = (tile * WORDS + tl.arange(0, WORDS)).to(tl.int64)
        inside = at < length
        words = tl.load(source + begins + at, mask=inside, other=0)
        moved = words
        if CONVERT:
            low = _half_to_half(words & 0xFFFF, FROM_BFLOAT)
            high = _half_to_half((words >> 16) & 0xFFFF, FROM_BFLOAT)
            moved = (high << 16) | low
        tl.store(destination + goes_to + at, moved, mask=inside)
        travels = words if SUM_SOURCE else moved
        travels = tl.where(inside, travels, 0)
        weights = _splitmix64((at + place).to(tl.uint64)) | 1
        products = travels.to(tl.uint32, bitcast=True).to(tl.uint64) * weights
        total += products.to(tl.int64, bitcast=True)
    tl.atomic_add(sums + piece, tl.sum(total, axis=0))


def programs(runs: int, longest: int) -> int:
    """How many programs share each of so many runs, of at most so many words."""
    return max(1, min(_PROGRAMS // runs, -(-longest // _WORDS)))


def move_runs(
    source: Tensor,
    destination: Tensor,
    runs: Tensor,
    longest: int,
    sums: Tensor,
    *,
    convert: bool,
    from_bfloat: bool,
    sum_source: bool,
    aligned: bool = False,
) -> None:
    """source, destination: flat int32; runs [R, 5 or more] int64, contiguous; sums [pieces] int64, added to.
    One device. `aligned`: every run begins on both sides, and ends, at a multiple of 4 words."""
    grid = (runs.shape[0], programs(runs.shape[0], longest))
    _move_runs[grid](
        source, destination, runs, sums,
        CONVERT=convert, FROM_BFLOAT=from_bfloat, SUM_SOURCE=sum_source, ALIGNED=aligned,
        ROW=runs.shape[1], WORDS=_WORDS, num_warps=_WARPS,
    )  # fmt: skip


@cache
def prepared(device: torch.device, sum_source: bool, aligned: bool) -> Kernel | None:
    """The kernel that moves rows of six words without converting them, to be launched with the addresses of
    source, destination, rows, and rows again; grid: (rows, `programs`).

    None where a launch beside Triton's own was tried and did not do it: its versions tell different things.
    """
    with torch.cuda.device(device):
        source = torch.arange(8, dtype=torch.int32, device=device)
        destination = torch.zeros_like(source)
        rows = torch.tensor([[0, 4, 4, 5, 0, 0]], dtype=torch.int64, device=device)
        compiled = _move_runs[(1, 1)](
            source, destination, rows, rows.view(-1),
            CONVERT=False, FROM_BFLOAT=False, SUM_SOURCE=sum_source, ALIGNED=aligned, ROW=6, WORDS=_WORDS,
            num_warps=_WARPS,
        )  # fmt: skip
        wanted = destination.tolist(), int(rows[0, 5])
        destination.zero_()
        rows[0, 5] = 0
        try:
            meta = compiled.metadata
            kernel = Kernel(int(compiled.function), 32 * meta.num_warps, meta.shared)
            _launch(kernel, device, (source, destination, rows, rows))
        except (AttributeError, TypeError, CudaError) as error:
            _LOG.warning("kernels are launched by Triton: %s", error)
            return None
        if (destination.tolist(), int(rows[0, 5])) != wanted:
            _LOG.warning("kernels are launched by Triton: a launch of our own moved nothing")
            return None
    return kernel


def _launch(kernel: Kernel, device: torch.device, arguments: tuple[Tensor, ...]) -> None:
    """Once, on torch's stream."""
    stream = torch.cuda.current_stream(device).cuda_stream
    addresses = tuple(argument.data_ptr() for argument in arguments)
    cuda_runtime().launch(kernel.function, (1, 1), kernel.threads, kernel.shared, stream, addresses)
