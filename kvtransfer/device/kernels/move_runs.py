"""Copies runs of words and sums them, in one kernel and one pass.

Several programs share the words of a run, each a tile at a time. Sums are of products modulo 2^64
(`kvtransfer.protocol.checksum`): each program writes its partial sum, and the host adds them
(`kvtransfer.device.piece_memory`).

Moves run beside other work: they use few programs (`programs`), so that other kernels find multiprocessors
and memory bandwidth free, and each program has two tiles of loads in flight.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.device.cuda_runtime import CudaError, cuda_runtime
from baton.device.streams.link_device import Kernel
from baton.device.word_sums import inside_run, splitmix64, tile_sum
from kvtransfer.device.kernels.move_plan import ROW_WORDS, SUM_PARTS
from kvtransfer.protocol.checksum import TILE_SEED, TILE_WORDS

_LOG = logging.getLogger(__name__)

_WARPS = 8
# The stride between the words of a tile that one thread handles.
_ACROSS = 1024
_TILE = {"ROW": ROW_WORDS, "DOWN": TILE_WORDS // _ACROSS, "ACROSS": _ACROSS, "TILE_SEED": TILE_SEED}
# Programs of all runs together, unless there are more runs: an H100 has 132 multiprocessors, of which NCCL's
# next kernel, which shares none, needs 32. Beside decode steps: with this few, a step starts as soon as
# without a move (`bench.decode --churn`); with 64, some µs later.
_PROGRAMS = 96
_PROGRAMS_BESIDE_STEPS = 24


@triton.jit
def _move_runs(source, destination, runs, sums, ALIGNED: tl.constexpr, STORES: tl.constexpr,
               PARTS: tl.constexpr, HEAD: tl.constexpr, ROW: tl.constexpr, DOWN: tl.constexpr,
               ACROSS: tl.constexpr, TILE_SEED: tl.constexpr):  # fmt: skip
    run = runs + tl.program_id(0) * ROW
    begins, goes_to, length = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    initial, place = tl.load(run + 3), tl.load(run + 4)
    if ALIGNED:  # accesses of 16 bytes
        begins, goes_to = begins // 4 * 4, goes_to // 4 * 4
        length, place = length // 4 * 4, place // 4 * 4
    lane = (tl.arange(0, DOWN)[:, None] * ACROSS + tl.arange(0, ACROSS)[None, :]).to(tl.int64)
    within = splitmix64(lane.to(tl.uint64)) | 1
    total = tl.zeros([ACROSS], dtype=tl.uint64)
    # Tiles start at multiples of their size within the piece, so every tile has the same first factors.
    first = (place // (DOWN * ACROSS)).to(tl.int32) + tl.program_id(1)
    last = tl.cdiv(place + length, DOWN * ACROSS).to(tl.int32)
    at, inside = inside_run(first, lane, place, length)
    words = tl.load(source + begins + at, mask=inside, other=0)
    for tile in range(first, last, tl.num_programs(1)):
        # The next tile's loads are in flight while this tile is processed.
        next_at, next_inside = inside_run(tile + tl.num_programs(1), lane, place, length)
        next_words = tl.load(source + begins + next_at, mask=next_inside, other=0)
        if STORES:
            tl.store(destination + goes_to + at, words, mask=inside)
        total += tile_sum(words, inside, within, tile, TILE_SEED)
        words, at, inside = next_words, next_at, next_inside
    found = tl.sum(total, axis=0).to(tl.int64, bitcast=True)
    number = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    count = tl.num_programs(0) * tl.num_programs(1)
    if number == 0:  # it adds the initial value, and clears parts without a program
        found += initial
        part = tl.arange(0, PARTS)
        tl.store(sums + part, tl.zeros([PARTS], dtype=tl.int64), mask=part >= count)
        if HEAD:  # the piece's header is copied behind the parts
            head = (source + begins - 2 * PARTS).to(tl.pointer_type(tl.int64))
            tl.store(sums + PARTS + part, tl.load(head + part))
    tl.store(sums + number, found)


def programs(runs: int, longest: int, *, beside_steps: bool = False) -> int:
    """Number of programs that share each of `runs` runs of at most `longest` words."""
    most = _PROGRAMS_BESIDE_STEPS if beside_steps else _PROGRAMS
    return max(1, min(most // runs, -(-longest // TILE_WORDS)))


def move_piece(
    source: Tensor, destination: Tensor | None, rows: Tensor, longest: int, parts: Tensor,
    *, aligned: bool, head: bool = False,
) -> None:  # fmt: skip
    """Enqueues a move of one piece's rows; `parts`, int64 [SUM_PARTS], add up to its sum. Without a
    destination the rows are only read. `aligned`: every row starts on both sides, and ends, at a multiple of
    4 words. `head`: the SUM_PARTS int64 before the first row's source are copied behind the parts."""
    grid = (rows.shape[0], programs(rows.shape[0], longest))
    there = source if destination is None else destination
    constants = _constants(aligned, stores=destination is not None, head=head)
    _move_runs[grid](source, there, rows, parts, **constants)


def _constants(aligned: bool, *, stores: bool, head: bool) -> dict[str, int]:
    """The constants of `_move_runs`."""
    shape = {"ALIGNED": aligned, "STORES": stores, "PARTS": SUM_PARTS, "HEAD": head, "num_warps": _WARPS}
    return shape | _TILE


@cache
def prepared(device: torch.device, aligned: bool, stores: bool, head: bool = False) -> Kernel | None:
    """The compiled kernel of `move_piece`, to be launched with the addresses of source, destination, rows and
    parts, the last two in host memory, over a grid of (rows, `programs`).

    None where a trial launch without Triton's launcher did not work, since what Triton exposes differs
    between its versions.
    """
    with torch.cuda.device(device):
        begins = 2 * SUM_PARTS
        source = torch.arange(begins + 8, dtype=torch.int32, device=device)
        destination = torch.zeros_like(source)
        rows = torch.tensor([[begins, 4, 4, 5, 0]], dtype=torch.int64).pin_memory()
        parts = torch.full((2 * SUM_PARTS,), 7, dtype=torch.int64).pin_memory()
        constants = _constants(aligned, stores=stores, head=head)
        compiled = _move_runs[(1, 1)](source, destination, rows, parts, **constants)
        torch.cuda.synchronize(device)
        wanted = destination.tolist(), parts.tolist()
        destination.zero_()
        parts.fill_(7)
        try:
            meta = compiled.metadata
            kernel = Kernel(int(compiled.function), 32 * meta.num_warps, meta.shared)
            _launch(kernel, device, (source, destination, rows, parts))
        except (AttributeError, TypeError, CudaError) as error:
            _LOG.warning("direct_kernel_launch_unavailable", extra={"reason": str(error)})
            return None
        torch.cuda.synchronize(device)
        if (destination.tolist(), parts.tolist()) != wanted:
            _LOG.warning("direct_kernel_launch_unavailable", extra={"reason": "a trial launch moved nothing"})
            return None
    return kernel


def _launch(kernel: Kernel, device: torch.device, arguments: tuple[Tensor, ...]) -> None:
    """Launches it once, on torch's current stream."""
    stream = torch.cuda.current_stream(device).cuda_stream
    addresses = tuple(argument.data_ptr() for argument in arguments)
    cuda_runtime().launch(kernel.function, (1, 1), kernel.threads, kernel.shared, stream, addresses)
