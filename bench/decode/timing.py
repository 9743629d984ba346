"""Measures how long a launch takes, and how fast a GPU reads its memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from baton.engine.tuning.measurement import graph_us

# Far more than the second-level cache holds.
_BYTES = 2 << 30
_PROGRAM_WORDS, _TILE = 1 << 17, 1 << 12


def microseconds(launch: Callable[[], None], device: str) -> float:
    """Duration of one launch: the median of a graph's replays; on a CPU it runs once."""
    if device == "cuda":
        return graph_us(launch)
    begun = time.perf_counter()
    launch()
    return (time.perf_counter() - begun) * 1e6


@triton.jit
def _read(words, out, PROGRAM_WORDS: tl.constexpr, TILE: tl.constexpr):
    start = words + tl.program_id(0) * PROGRAM_WORDS
    total = tl.zeros((TILE,), tl.int32)
    for at in tl.range(0, PROGRAM_WORDS, TILE, num_stages=4):
        total ^= tl.load(start + at + tl.arange(0, TILE))
    tl.store(out + tl.program_id(0), tl.xor_sum(total, 0))


def read_bytes_s() -> float:
    """The bandwidth at which the current GPU reads its memory, in bytes a second: the median of several reads
    of 2 GiB by a kernel that does nothing else."""
    words = torch.zeros(_BYTES // 4, dtype=torch.int32, device="cuda")
    programs = words.numel() // _PROGRAM_WORDS
    out = torch.zeros(programs, dtype=torch.int32, device="cuda")
    took_us = graph_us(
        lambda: _read[(programs,)](words, out, PROGRAM_WORDS=_PROGRAM_WORDS, TILE=_TILE, num_warps=8)
    )
    return _BYTES / took_us * 1e6
