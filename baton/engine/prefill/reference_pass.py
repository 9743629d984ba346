"""A prefill step's forward pass by the reference model: on a CPU, in mode `exact`, and in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.memory.kv_cache import BlockMemory
from baton.engine.model.reference import ReferenceModel, Rows
from baton.engine.plan.prefill_step import PrefillStep, StepChunk
from baton.perf_model.row_times import RowTimes


class ReferencePass:
    """Runs chunks as rows of the reference model."""

    alignment = 1
    refused = 0
    uncaptured = ""
    graph_rows = 0
    timed_passes = None
    row_times = RowTimes()

    def __init__(self, reference: ReferenceModel, cache: BlockMemory) -> None:
        self._reference = reference
        self._cache = cache

    def forward(self, step: PrefillStep, joined: JoinedRows | None = None) -> Tensor:
        """Writes keys and values into the chunks' blocks → [N, hidden] after the final norm, rows packed in
        the chunks' order. Raises ValueError where rows join: their step is computed by itself."""
        if joined is not None:
            raise ValueError("no rows can join the reference's pass")
        device, chunks = self._reference.device, step.chunks
        rows = Rows(
            token_ids=torch.tensor(
                [t for c in chunks for t in c.token_ids], dtype=torch.int64, device=device
            ),
            positions=torch.cat([torch.arange(c.start, c.start + c.count, device=device) for c in chunks]),
            query_start=[0, *accumulate(chunk.count for chunk in chunks)],
            block_tables=_block_tables(chunks, device),
        )
        return self._reference.forward(rows, self._cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] of `forward` → [M, vocab] in the model's dtype."""
        return self._reference.logits(hidden)


def _block_tables(chunks: Sequence[StepChunk], device: torch.device) -> tuple[Tensor, ...]:
    tables = []
    for group in zip(*(chunk.blocks for chunk in chunks), strict=True):
        width = max(len(blocks) for blocks in group)
        padded = [list(blocks) + [0] * (width - len(blocks)) for blocks in group]
        tables.append(torch.tensor(padded, dtype=torch.int64, device=device))
    return tuple(tables)
