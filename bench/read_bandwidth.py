"""The bandwidth at which this GPU reads its memory, as a kernel that does nothing else measures it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.engine.tuning.measurement import graph_us

# Far more than the second-level cache holds.
_BYTES = 2 << 30
_PROGRAM_WORDS, _TILE = 1 << 17, 1 << 12


@triton.jit
def _read(words, out, PROGRAM_WORDS: tl.constexpr, TILE: tl.constexpr):
    start = words + tl.program_id(0) * PROGRAM_WORDS
    total = tl.zeros((TILE,), tl.int32)
    for at in tl.range(0, PROGRAM_WORDS, TILE, num_stages=4):
        total ^= tl.load(start + at + tl.arange(0, TILE))
    tl.store(out + tl.program_id(0), tl.xor_sum(total, 0))


def read_bytes_s() -> float:
    """Bytes a second, the median of several reads of 2 GiB by the current GPU."""
    words = torch.zeros(_BYTES // 4, dtype=torch.int32, device="cuda")
    programs = words.numel() // _PROGRAM_WORDS
    out = torch.zeros(programs, dtype=torch.int32, device="cuda")
    microseconds = graph_us(
        lambda: _read[(programs,)](words, out, PROGRAM_WORDS=_PROGRAM_WORDS, TILE=_TILE, num_warps=8)
    )
    return _BYTES / microseconds * 1e6
