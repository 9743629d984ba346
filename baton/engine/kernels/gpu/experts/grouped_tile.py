"""Steps that the kernels of the experts' products share: the rows of a tile, and where its sums go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton.engine.kernels.expert_tiles import FEW_ROWS, MANY_ROWS
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.gemm.gemv import gated


@triton.jit
def tile_rows(tile_entry, tile, top_k, TILE: tl.constexpr, EPILOGUE: tl.constexpr):
    """Finds a tile's rows → the rows of x, the rows of out, and which places have an entry [TILE]. Places
    without one read a row that exists, and nothing of them is stored."""
    place = tl.arange(0, TILE)
    entry = tl.load(tile_entry + tile * TILE + place)
    there = entry >= 0
    at = tile * TILE + place
    if EPILOGUE >= 2:
        source = tl.maximum(entry, 0) // top_k
        target = at
    else:
        source = tl.where(there, at, tile * TILE)
        target = entry
    return source, target, there


@triton.jit
def store_tile(sums, ups, out, n, target, there, N, EPILOGUE: tl.constexpr):
    """Stores sums [BN, TILE], gated where there are two of them, at the rows `target` of out [.., N]."""
    dtype: tl.constexpr = out.dtype.element_ty
    if EPILOGUE >= 2:
        sums = gated(sums, ups, dtype, EPILOGUE)
    mask = (n < N)[:, None] & there[None, :]
    tl.store(out + target.to(tl.int64)[None, :] * N + n[:, None], sums.to(dtype), mask=mask)


@dataclass(frozen=True, slots=True)
class GroupedTuning:
    """Tiles of the experts' products: `columns` of W's rows and `width` along K of a program's tile."""

    columns: int
    width: int
    stages: int
    warps: int

    @classmethod
    def of(
        cls, tile_rows: int, epilogue: Epilogue, dtype: torch.dtype, *, quantised: bool = False
    ) -> GroupedTuning:
        """Chooses the tuning for tiles of `tile_rows` rows of x in a dtype; `quantised`: of experts in fewer
        bits. Those of 16 bits and of codes are the best ones of `bench.decode experts` on an H200; int4 and
        `down` of 16-bit prompts were not measured."""
        many, gated = tile_rows > FEW_ROWS, epilogue.gated
        if dtype.itemsize > 2:
            return cls(128, 64, 2, 8) if many else cls(32 if gated else 64, 128, 4, 4)
        if dtype.itemsize == 1:
            return cls(64 if gated else 128, 128, 3, 4) if many else cls(64 if gated else 128, 128, 3, 8)
        if quantised:
            return cls(64 if gated else 128, 64, 3, 4) if many else cls(64, 128, 3, 4)
        if many:
            return cls(128, 64, 4, 8 if tile_rows > MANY_ROWS else 4)
        return cls(128, 128, 3, 4 if gated else 8)
