"""The reference forward pass in plain torch, for every family and dtype; what the GPU passes are tested
against.

A pass takes packed rows of any mixture of prompt chunks and decode steps. A row's result is bitwise the same
whatever other rows are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.reference.cache_write import token_rows
from baton.engine.kernels.reference.linear import linear, pad_rows
from baton.engine.kernels.reference.paged_attention import plan_attention
from baton.engine.kernels.reference.row_ops import rms_norm
from baton.engine.memory.kv_cache import BlockMemory, KVCache
from baton.engine.model.layers.attention import ReferenceRows
from baton.engine.model.layers.layer import reference_layer
from baton.engine.model.modules import Model
from baton.engine.parallel.ranks_in_turn import RankPass, run_in_turn


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows of one pass. Sequence b owns rows query_start[b]:query_start[b + 1].

    `token_ids`, `positions`: [N] int64. A row attends to its own sequence's positions up to its own.
    `query_start`: B + 1 numbers on the host, from 0 to N. `block_tables`: for each cache group [B, max
    blocks] int64; entries that no row needs are 0.
    """

    token_ids: Tensor
    positions: Tensor
    query_start: list[int]
    block_tables: tuple[Tensor, ...]

    def on(self, device: torch.device) -> Rows:
        """The same rows on a device."""
        tables = tuple(table.to(device) for table in self.block_tables)
        return Rows(self.token_ids.to(device), self.positions.to(device), self.query_start, tables)


class ReferenceModel:
    """Runs a model's modules with the plain-torch kernels; of several ranks, one after the other."""

    def __init__(self, *ranks: Model) -> None:
        self.device = ranks[0].device
        self._ranks = ranks

    @torch.inference_mode()
    def forward(
        self, rows: Rows, cache: BlockMemory, between_layers: Callable[[], None] | None = None
    ) -> Tensor:
        """Writes the rows' keys and values into the cache, each rank its heads'; returns [N, hidden] after
        the final norm, the same on all ranks.

        `between_layers` is called after each layer, so that a host that computes the step itself can do other
        work.
        """
        last = len(self._ranks) - 1
        passes = [
            rank_pass(model, rows.on(model.device), mine, between_layers if rank == last else None)
            for rank, (model, mine) in enumerate(zip(self._ranks, cache.ranks, strict=True))
        ]
        return run_in_turn(passes)[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] from `forward` → [M, vocab] in the dtype of the activations; each rank computes
        its part of the vocabulary."""
        weights = [model.head.linear.weight for model in self._ranks]
        parts = [linear(hidden.to(weight.device), weight).to(hidden.device) for weight in weights]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def rank_pass(
    model: Model, rows: Rows, cache: KVCache, between_layers: Callable[[], None] | None
) -> RankPass[Tensor]:
    """One rank's pass → [N, hidden] after the final norm."""
    shared = _prepare(model, rows, cache)
    hidden = pad_rows(model.embedding[rows.token_ids])
    if model.embedding_scale != 1:
        hidden = hidden * model.embedding_scale
    for layer in model.layers:
        hidden = yield from reference_layer(model.config, layer, hidden, shared, cache)
        if between_layers is not None:
            between_layers()
    return rms_norm(hidden, model.norm.gain, model.norm.eps)[: rows.token_ids.shape[0]]


def _prepare(model: Model, rows: Rows, cache: KVCache) -> ReferenceRows:
    starts = torch.tensor(rows.query_start, dtype=torch.int64, device=model.device)
    sequence = torch.repeat_interleave(starts.diff(), output_size=rows.token_ids.shape[0])
    cache_rows, plans = [], []
    for group, tensor, table in zip(model.layout.groups, cache.groups, rows.block_tables, strict=True):
        cache_rows.append(token_rows(tensor, table[sequence], rows.positions[:, None])[:, 0])
        plans.append(plan_attention(rows.query_start, rows.positions, table, tensor, group.window))
    tables = [rope.cos_sin(rows.positions) for rope in model.ropes]
    rotary = [(pad_rows(cos), pad_rows(sin)) for cos, sin in tables]
    return ReferenceRows(rotary, cache_rows, plans, rows.token_ids.shape[0])
