"""Steps that the kernels of the experts' products share: the rows of a tile, and where its sums go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton.engine.kernels.expert_tiles import FEW_ROWS
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
    """Tiles of the experts' products: `columns` of W's rows and `width` along K of a program's tile. Measured
    was one of `of`, of 8 rows by experts of Qwen3-30B-A3B on an H200: their gate and up take 85.0 us, with 32
    columns and four stages 93.1."""

    columns: int
    width: int
    stages: int
    warps: int

    @classmethod
    def of(
        cls, tile_rows: int, epilogue: Epilogue, dtype: torch.dtype, *, narrow: bool = False
    ) -> GroupedTuning:
        """Chooses the tuning for tiles of `tile_rows` rows of x in a dtype; `narrow`: in
        programs of few columns, since there are few, or since codes become numbers in registers."""
        wide = dtype.itemsize > 2
        if dtype.itemsize == 1:  # codes: as many columns as the matrix units take of them at once
            return cls(128, 128, 4, 8) if tile_rows > FEW_ROWS else cls(64, 128, 4, 4)
        if tile_rows > FEW_ROWS:
            return cls(128, 64, 2 if wide else 3, 8)
        if epilogue.gated and not narrow and not wide:
            return cls(128, 128, 3, 4)
        # Of few experts many programs, each with two matrices.
        return cls(32 if epilogue.gated else 64, 128, 4, 4)
