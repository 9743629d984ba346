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
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.layers.attention import ReferenceRows
from baton.engine.model.layers.layer import reference_layer
from baton.engine.model.modules import Model


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


class ReferenceModel:
    """Runs a model's modules with the plain-torch kernels."""

    def __init__(self, model: Model) -> None:
        self.device = model.device
        self._model = model

    @torch.inference_mode()
    def forward(self, rows: Rows, cache: KVCache, between_layers: Callable[[], None] | None = None) -> Tensor:
        """Writes the rows' keys and values into the cache; returns [N, hidden] after the final norm.

        `between_layers` is called after each layer, so that a host that computes the step itself can do other
        work.
        """
        model, count = self._model, rows.token_ids.shape[0]
        shared = self._prepare(rows, cache)
        hidden = pad_rows(model.embedding[rows.token_ids])
        if model.embedding_scale != 1:
            hidden = hidden * model.embedding_scale
        for layer in model.layers:
            hidden = reference_layer(model.config, layer, hidden, shared, cache)
            if between_layers is not None:
                between_layers()
        return rms_norm(hidden, model.norm.gain, model.norm.eps)[:count]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] from `forward` → [M, vocab] in the dtype of the activations."""
        return linear(hidden, self._model.head.linear.weight)

    def _prepare(self, rows: Rows, cache: KVCache) -> ReferenceRows:
        model = self._model
        starts = torch.tensor(rows.query_start, dtype=torch.int64, device=model.device)
        sequence = torch.repeat_interleave(starts.diff(), output_size=rows.token_ids.shape[0])
        cache_rows, plans = [], []
        for group, tensor, table in zip(model.layout.groups, cache.groups, rows.block_tables, strict=True):
            cache_rows.append(token_rows(tensor, table[sequence], rows.positions[:, None])[:, 0])
            plans.append(plan_attention(rows.query_start, rows.positions, table, tensor, group.window))
        tables = [rope.cos_sin(rows.positions) for rope in model.ropes]
        rotary = [(pad_rows(cos), pad_rows(sin)) for cos, sin in tables]
        return ReferenceRows(rotary, cache_rows, plans, rows.token_ids.shape[0])
