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

from baton.engine.kernels.reference.cache_write import cache_write, token_rows
from baton.engine.kernels.reference.linear import linear, pad_rows
from baton.engine.kernels.reference.paged_attention import TileBatch, paged_attention, plan_attention
from baton.engine.kernels.reference.row_ops import apply_rope, gated, rms_norm
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.modules import Attention, DenseMlp, Model, Product


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


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the layers share within one forward pass. `rotary`: cos and sin for each rotary embedding of the
    model; `cache_rows`, `plans`: for each cache group."""

    rotary: list[tuple[Tensor, Tensor]]
    cache_rows: list[Tensor]
    plans: list[list[TileBatch]]
    rows: int


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
            hidden = hidden + self._attention(layer.attention, hidden, shared, cache)
            hidden = hidden + self._mlp(layer.mlp, hidden)
            if between_layers is not None:
                between_layers()
        return rms_norm(hidden, model.norm.gain, model.norm.eps)[:count]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] from `forward` → [M, vocab] in the dtype of the activations."""
        return linear(hidden, self._model.head.linear.weight)

    def _prepare(self, rows: Rows, cache: KVCache) -> _Pass:
        model = self._model
        starts = torch.tensor(rows.query_start, dtype=torch.int64, device=model.device)
        sequence = torch.repeat_interleave(starts.diff(), output_size=rows.token_ids.shape[0])
        cache_rows, plans = [], []
        for group, tensor, table in zip(model.layout.groups, cache.groups, rows.block_tables, strict=True):
            cache_rows.append(token_rows(tensor, table[sequence], rows.positions[:, None])[:, 0])
            plans.append(plan_attention(rows.query_start, rows.positions, table, tensor, group.window))
        tables = [rope.cos_sin(rows.positions) for rope in model.ropes]
        rotary = [(pad_rows(cos), pad_rows(sin)) for cos, sin in tables]
        return _Pass(rotary, cache_rows, plans, rows.token_ids.shape[0])

    def _attention(self, attention: Attention, hidden: Tensor, shared: _Pass, cache: KVCache) -> Tensor:
        config = self._model.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = _product(attention.qkv, hidden).view(-1, heads + 2 * kv_heads, config.head_dim)
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if attention.head_norms is not None:
            query, key = (
                rms_norm(x, gain, config.rms_norm_eps)
                for x, gain in zip((query, key), attention.head_norms, strict=True)
            )
        rotary = shared.rotary[attention.rope]
        query, key = apply_rope(query, *rotary), apply_rope(key, *rotary)
        number, index, count = attention.group, attention.index, shared.rows
        group, scales = cache.groups[number], cache.scales[number]
        cache_write(group, index, key[:count], value[:count], shared.cache_rows[number], scales)
        attn_out = paged_attention(query, group, index, shared.plans[number], config.attention_scale, scales)
        return _product(attention.output, attn_out.view(hidden.shape[0], -1))

    def _mlp(self, mlp: DenseMlp, hidden: Tensor) -> Tensor:
        return _product(mlp.down, gated(_product(mlp.gate_up, hidden), mlp.gate_up.epilogue))


def _product(product: Product, x: Tensor) -> Tensor:
    """norm(x) · Wᵀ + bias; epilogues are the caller's."""
    if product.norm is not None:
        x = rms_norm(x, product.norm.gain, product.norm.eps)
    result = linear(x, product.linear.weight, product.linear.bias)
    post = product.post_norm
    return result if post is None else rms_norm(result, post.gain, post.eps)
