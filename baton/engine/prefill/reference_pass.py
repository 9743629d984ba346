"""A prefill step's forward pass by the reference model: on a CPU, in mode `exact`, and in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.reference import ReferenceModel, Rows
from baton.engine.prefill.scheduler import Chunk


class PlainPass:
    """Runs chunks as rows of the reference model."""

    grain = 1
    refused = 0
    uncaptured = ""
    paces = None

    def __init__(self, reference: ReferenceModel, cache: KVCache) -> None:
        self._reference = reference
        self._cache = cache

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Writes the chunks' keys and values into their sequences' blocks → [N, hidden] after the final norm,
        rows packed in the chunks' order."""
        device = self._reference.device
        tokens = [t for c in chunks for t in c.sequence.token_ids[c.start : c.start + c.count]]
        positions = [p for c in chunks for p in range(c.start, c.start + c.count)]
        rows = Rows(
            token_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            query_start=[0, *accumulate(chunk.count for chunk in chunks)],
            block_tables=_block_tables(chunks, device),
        )
        return self._reference.forward(rows, self._cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] of `forward` → [M, vocab] in the model's dtype."""
        return self._reference.logits(hidden)


def _block_tables(chunks: Sequence[Chunk], device: torch.device) -> tuple[Tensor, ...]:
    tables = []
    held = [chunk.sequence.blocks for chunk in chunks if chunk.sequence.blocks is not None]
    for group in zip(*held, strict=True):
        width = max(len(blocks) for blocks in group)
        padded = [list(blocks) + [0] * (width - len(blocks)) for blocks in group]
        tables.append(torch.tensor(padded, dtype=torch.int64, device=device))
    return tuple(tables)
