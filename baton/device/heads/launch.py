"""Launches moves between whole blocks and several devices' heads on torch's streams; brings Triton."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from baton.device.cuda_runtime import cuda_runtime
from baton.device.heads.kernel import HeadMove, move_heads, prepared_heads, programs
from baton.device.heads.moves import HeadMoves


def launch_heads(
    heads: HeadMoves, whole: Tensor, table: Tensor, blocks: int, *, gathers: bool, stream: int
) -> None:
    """Enqueues a move without sums on the current stream, whose handle is `stream`. whole: uint8 on the first
    device, a whole number of 16 bytes from an allocation's first byte on; table: pinned."""
    move = HeadMove(heads.aligned(), gathers)
    grid = programs(blocks * len(heads.runs), heads.longest, beside_steps=True)
    kernel = prepared_heads(heads.device, move)
    if kernel is None:
        move_heads(move, grid, heads.pool, whole.view(torch.int32), table, heads.runs, table)
        return
    addresses = heads.address, whole.data_ptr(), table.data_ptr(), heads.runs.data_ptr(), table.data_ptr()
    cuda_runtime().launch(kernel.function, grid, kernel.threads, kernel.shared, stream, addresses)


def warm_heads(groups: Iterable[HeadMoves]) -> None:
    """Compiles the kernels of these moves."""
    for heads in groups:
        for gathers in (False, True):
            prepared_heads(heads.device, HeadMove(heads.aligned(), gathers))
