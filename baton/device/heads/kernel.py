"""Gathers whole blocks from the heads that several devices have, and scatters them, in one kernel of the
first device, which loads and stores the others' memory by its address there (`baton.device.heads.moves` has
the table that it reads).

Every program has runs of heads in turn, a tile at a time. Other devices' memory is read through the L2 cache
alone, which is where its owner's stores are.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.device.cuda_runtime import CudaError, cuda_runtime
from baton.device.heads.table import HEADER_WORDS, RUN_WORDS
from baton.device.streams.link_device import Kernel
from baton.device.word_sums import inside_run, splitmix64, tile_sum

_LOG = logging.getLogger(__name__)

_WARPS = 8
# The stride between the words of a tile that one thread handles, and how many it does.
_ACROSS, _DOWN = 1024, 4
TILE_WORDS = _ACROSS * _DOWN
# Programs: as those of moves on one device (`kvtransfer.device.kernels.move_runs`), beside steps and alone.
_PROGRAMS, _PROGRAMS_BESIDE_STEPS = 96, 24


class HeadMove(NamedTuple):
    """A variant of the kernel. `aligned`: all runs begin and end at multiples of 4 words. `gathers`: from the
    devices into whole blocks, else from those. `parts`: how many partial sums of the words at their places
    are written, with `tile_seed` (`kvtransfer.protocol.checksum`); 0: none. `head`: as many int64 before the
    first block in whole blocks are copied behind the parts."""

    aligned: bool
    gathers: bool
    parts: int = 0
    tile_seed: int = 0
    head: bool = False

    def constants(self) -> dict[str, int]:
        return {
            "ALIGNED": self.aligned, "GATHERS": self.gathers, "PARTS": self.parts, "TILE_SEED":
            self.tile_seed, "HEAD": self.head, "HEADER": HEADER_WORDS, "RUN": RUN_WORDS, "DOWN": _DOWN,
            "ACROSS": _ACROSS, "num_warps": _WARPS,
        }  # fmt: skip


@triton.jit
def _move_heads(pool, whole, table, runs, sums, ALIGNED: tl.constexpr, GATHERS: tl.constexpr,
                PARTS: tl.constexpr, TILE_SEED: tl.constexpr, HEAD: tl.constexpr, HEADER: tl.constexpr,
                RUN: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):  # fmt: skip
    blocks, begins, ends = tl.load(table), tl.load(table + 1), tl.load(table + 2)
    initial, runs_a_block = tl.load(table + 3), tl.load(table + 4)
    number = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    lane = (tl.arange(0, DOWN)[:, None] * ACROSS + tl.arange(0, ACROSS)[None, :]).to(tl.int64)
    within = splitmix64(lane.to(tl.uint64)) | 1
    total = tl.zeros([ACROSS], dtype=tl.uint64)
    items = (blocks * runs_a_block).to(tl.int32)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        block, run = table + HEADER + item // runs_a_block * 2, runs + item % runs_a_block * RUN
        first, stride, at, length = tl.load(run), tl.load(run + 1), tl.load(run + 2), tl.load(run + 3)
        low, high = tl.maximum(at, begins), tl.minimum(at + length, ends)
        length = tl.maximum(high - low, 0)
        mine = first + tl.load(block) * stride + low - at
        there = tl.load(block + 1) + low - begins
        place = item // runs_a_block * (ends - begins) + low - begins
        if ALIGNED:  # accesses of 16 bytes
            mine, there = mine // 4 * 4, there // 4 * 4
            length, place = length // 4 * 4, place // 4 * 4
        held = tl.where(stride > 0, length, 0)  # padding is on no device
        first_tile = (place // (DOWN * ACROSS)).to(tl.int32) + tl.program_id(1)
        last_tile = tl.cdiv(place + length, DOWN * ACROSS).to(tl.int32)
        for tile in range(first_tile, last_tile, tl.num_programs(1)):
            offset, inside = inside_run(tile, lane, place, length)
            on_device = inside & (offset < held)
            if GATHERS:
                words = tl.load(pool + mine + offset, mask=on_device, other=0, cache_modifier=".cg")
                tl.store(whole + there + offset, words, mask=inside)
            else:
                words = tl.load(whole + there + offset, mask=inside, other=0, cache_modifier=".cg")
                tl.store(pool + mine + offset, words, mask=on_device)
            if PARTS:
                total += tile_sum(words, inside, within, tile, TILE_SEED)
    if PARTS:
        found = tl.sum(total, axis=0).to(tl.int64, bitcast=True)
        if number == 0:  # it adds the initial value, and clears parts without a program
            found += initial
            part = tl.arange(0, PARTS)
            tl.store(
                sums + part, tl.zeros([PARTS], dtype=tl.int64),
                mask=part >= tl.num_programs(0) * tl.num_programs(1),
            )  # fmt: skip
            if HEAD:
                head = (whole + tl.load(table + HEADER + 1) - 2 * PARTS).to(tl.pointer_type(tl.int64))
                tl.store(sums + PARTS + part, tl.load(head + part))
        tl.store(sums + number, found)


def programs(runs: int, longest: int, *, beside_steps: bool = False) -> tuple[int, int]:
    """The grid for `runs` runs in all of at most `longest` words: programs that take runs in turn, and how
    many share each."""
    most = _PROGRAMS_BESIDE_STEPS if beside_steps else _PROGRAMS
    takers = max(1, min(most, runs))
    return takers, max(1, min(most // takers, -(-longest // TILE_WORDS)))


def move_heads(
    move: HeadMove,
    grid: tuple[int, int],
    pool: Tensor,
    whole: Tensor,
    table: Tensor,
    runs: Tensor,
    sums: Tensor,
) -> None:
    """Enqueues a move on the current stream, by Triton's launcher. pool, whole: flat int32; table, runs,
    sums: int64; `sums` of twice `move.parts` elements where there is a head."""
    _move_heads[grid](pool, whole, table, runs, sums, **move.constants())


@cache
def prepared_heads(device: torch.device, move: HeadMove) -> Kernel | None:
    """The compiled kernel, to be launched with the addresses of pool, whole blocks, table, runs and sums over
    a grid of `programs`; compiles it, which takes seconds.

    None where a trial launch without Triton's launcher did not work, since what Triton exposes differs
    between its versions.
    """
    with torch.cuda.device(device):
        by_triton, directly = _trial(device, move), _trial(device, move)
        compiled = _move_heads[(1, 1)](*by_triton, **move.constants())
        torch.cuda.synchronize(device)
        try:
            meta = compiled.metadata
            kernel = Kernel(int(compiled.function), 32 * meta.num_warps, meta.shared)
            addresses = tuple(argument.data_ptr() for argument in directly)
            stream = torch.cuda.current_stream(device).cuda_stream
            cuda_runtime().launch(kernel.function, (1, 1), kernel.threads, kernel.shared, stream, addresses)
        except (AttributeError, TypeError, CudaError) as error:
            _LOG.warning("direct_kernel_launch_unavailable", extra={"reason": str(error)})
            return None
        torch.cuda.synchronize(device)
        if not all(map(torch.equal, by_triton, directly)):
            _LOG.warning("direct_kernel_launch_unavailable", extra={"reason": "a trial launch moved nothing"})
            return None
    return kernel


def _trial(device: torch.device, move: HeadMove) -> tuple[Tensor, ...]:
    """Arguments of a move of one run of eight words."""
    begins = 2 * move.parts
    pool = torch.arange(1, 17, dtype=torch.int32, device=device)
    whole = torch.arange(20, 28 + begins, dtype=torch.int32, device=device)
    table = torch.tensor([1, 0, 8, 5, 1, 0, 1, begins], dtype=torch.int64).pin_memory()
    runs = torch.tensor([0, 8, 0, 8], dtype=torch.int64, device=device)
    sums = torch.full((max(2, 2 * move.parts),), 7, dtype=torch.int64).pin_memory()
    return pool, whole, table, runs, sums
