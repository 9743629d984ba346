"""The router of one row a program, for steps of few rows: reading the router takes longer than all products,
and is shared by many programs. Imported by `route_rows`, which says what it computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.device.ptx import ON_CHIP, together, wait_for_previous
from baton.engine.kernels.gpu.experts.choose_experts import choose_experts, gather_entries
from baton.engine.kernels.gpu.gemm.quantize_rows import MOST_E4M3, store_codes


@triton.jit(do_not_specialize=["rows", "tile_count"])
def route_row(
    hidden, gain, router, present, normed, ids, weights, taken_in_all, logits, counts, arrived, tile_expert,
    tile_entry, tile_count, eps, rows, scales,
    WIDTH: tl.constexpr, WIDTH_POWER: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_POWER: tl.constexpr,
    TOP_K: tl.constexpr, TOP_K_POWER: tl.constexpr, NORMALISE: tl.constexpr, BE: tl.constexpr,
    TILE: tl.constexpr, CODES: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (row, part): a row's logits of BE experts; the last of a row chooses its experts, and the last
    row to be chosen gathers the entries of all, MOST rows at most, where TILE is not 0. CODES: normed rows
    are stored as codes, with a scale each."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    k = tl.arange(0, WIDTH_POWER)
    inside = k < WIDTH
    expert = part * BE + tl.arange(0, BE)
    router_rows = router + tl.minimum(expert, EXPERTS - 1)[:, None] * WIDTH
    # What no kernel writes is on its way before the kernel before has ended.
    matrix = tl.load(router_rows + k[None, :], mask=inside[None, :], other=0.0)
    gains = tl.load(gain + k, mask=inside, other=0.0)
    if EARLY:
        wait_for_previous()
    there = tl.load(present + row) >= 0
    last = part == 0
    if there:
        at = row.to(tl.int64) * WIDTH + k
        values = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
        x = values * tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
        dtype: tl.constexpr = hidden.dtype.element_ty
        if gain.dtype.element_ty == dtype:
            x = x.to(dtype).to(tl.float32)
        x = (x * gains.to(tl.float32)).to(dtype)
        if part == 0:
            if CODES:
                store_codes(x.to(tl.float32), normed, scales, row.to(tl.int64), k, WIDTH, MOST_E4M3)
            else:
                tl.store(normed + at, x, mask=inside)
        sums = tl.sum(matrix.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        tl.store(logits + row.to(tl.int64) * EXPERTS + expert, sums, mask=expert < EXPERTS)
        if ON_CHIP:
            tl.debug_barrier()
        last = tl.atomic_add(arrived + row, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if last:
        tl.store(arrived + row, 0)
        one = row + tl.arange(0, 1)
        known = tl.load(present + one) >= 0
        choose_experts(
            logits, ids, weights, counts + row * EXPERTS, taken_in_all, one, known, rows,
            EXPERTS, EXPERTS_POWER, TOP_K, TOP_K_POWER, NORMALISE, 1,
        )  # fmt: skip
        if TILE > 0:
            together()
            if tl.atomic_add(arrived + rows, 1, sem="acq_rel") == rows - 1:
                tl.store(arrived + rows, 0)
                every = tl.arange(0, MOST)
                place = tl.arange(0, TOP_K_POWER)[None, :]
                numbers = tl.load(
                    ids + every[:, None] * TOP_K + place,
                    mask=(every < rows)[:, None] & (place < TOP_K), other=-1, cache_modifier=".cg",
                )  # fmt: skip
                takes = tl.zeros((MOST, EXPERTS_POWER), tl.int32)
                for turn in tl.static_range(TOP_K):
                    number = tl.max(tl.where(place == turn, numbers, -1), 1)[:, None]
                    takes = tl.where(number == tl.arange(0, EXPERTS_POWER)[None, :], 1, takes)
                gather_entries(
                    tile_expert, tile_entry, tile_count, every, tl.max(numbers, 1) >= 0, numbers, takes,
                    EXPERTS_POWER, TOP_K, TOP_K_POWER, TILE,
                )  # fmt: skip
