"""Ranks of a model that one process computes in turn: how a CPU worker has several, how several GPUs compute
prompts in mode `exact`, and what devices that run at once are compared with.

A rank's pass is a generator. It yields its partial sum wherever all ranks' are added, and is sent the total:

    rank 0   products ─ yield partial ─┐                        ┌─ products ─ …
    rank 1   products ─ yield partial ─┴─ sum in rank order ─ ──┴─ products ─ …

So it can read nothing of another rank but that sum.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
RankPass = Generator[Tensor, Tensor, Result]
"""A pass of one rank: yields partial sums, is sent totals, returns its result."""


def run_in_turn(passes: Sequence[RankPass[Result]]) -> list[Result]:
    """Runs the passes of all ranks, in rank order to the next sum of each, until they have ended; returns
    their results. Raises ValueError where some end before others."""
    totals: Sequence[Tensor | None] = [None] * len(passes)
    while True:
        partial: list[Tensor] = []
        results: list[Result] = []
        for one, total in zip(passes, totals, strict=True):
            try:
                partial.append(next(one) if total is None else one.send(total))
            except StopIteration as end:
                results.append(end.value)
        if not partial:
            return results
        if results:
            raise ValueError(f"{len(results)} of {len(passes)} ranks take no part in a sum")
        total = sum_in_order(partial)
        # Each rank has a total of its own, on its device.
        totals = [total, *(total.to(part.device, copy=True) for part in partial[1:])]


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape and dtype in their order, in float32 or wider, rounded once, on the
    first one's device."""
    first, *others = parts
    if not others:
        return first
    total = first.to(torch.promote_types(first.dtype, torch.float32))
    for part in others:
        total = total + part.to(total.device)
    return total.to(first.dtype)
