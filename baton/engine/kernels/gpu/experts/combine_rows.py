"""The weighted sum of each row's experts, added to the residual stream, a program a part of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import dependent_launch, wait_for_previous


@triton.jit
def _combine(
    hidden, results, ids, weights, places, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    PLACES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        wait_for_previous()
    row = tl.program_id(0)
    if tl.load(ids + row * TOP_K) < 0:  # a row has all its experts, or none
        return
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(TOP_K):
        entry = row * TOP_K + place
        at = tl.load(places + entry) if PLACES else entry
        result = tl.load(results + at.to(tl.int64) * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
        total += result * tl.load(weights + entry)
    dtype: tl.constexpr = hidden.dtype.element_ty
    before = tl.load(hidden + row.to(tl.int64) * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    after = before + total.to(dtype).to(tl.float32)
    tl.store(hidden + row.to(tl.int64) * WIDTH + i, after.to(dtype), mask=i < WIDTH)


def combine_rows(
    hidden: Tensor,
    results: Tensor,
    ids: Tensor,
    weights: Tensor,
    places: Tensor | None = None,
    *,
    early: bool = False,
) -> None:
    """results [R · k, H], ids and weights [R, k] → hidden [R, H] += the sum of each row's results by its
    weights, in float32 in the order of k, rounded before it is added. A row of experts -1 stays as it is.
    `places` [R · k] int32: each entry's row of results, of which there are others too. `early`: see
    `dependent_launch`."""
    rows, width = hidden.shape
    top_k = ids.shape[1]
    entries = len(results) if places is None else len(places)
    if not ids.shape == weights.shape == (rows, top_k) or (entries, results.shape[1]) != (
        rows * top_k,
        width,
    ):
        raise ValueError(f"hidden {tuple(hidden.shape)} and results {tuple(results.shape)} do not fit")
    block = min(1024, triton.next_power_of_2(width))
    _combine[(rows, triton.cdiv(width, block))](
        hidden, results, ids, weights, ids if places is None else places, WIDTH=width, BLOCK=block,
        TOP_K=top_k, PLACES=places is not None, EARLY=early, num_warps=4, **dependent_launch(early),
    )  # fmt: skip
