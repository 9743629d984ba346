"""The transformer, driven by its configuration: one class for every family.

A pass takes packed rows of any mixture of prompts' chunks and single decode steps. In mode `exact`, the
only one so far, a row's result is bitwise the same in whatever company it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.reference.cache_write import cache_write, token_rows
from baton.engine.kernels.reference.exact_tiles import pad_rows
from baton.engine.kernels.reference.linear import linear
from baton.engine.kernels.reference.paged_attention import TileBatch, paged_attention, plan_attention
from baton.engine.kernels.reference.rms_norm import rms_norm
from baton.engine.kernels.reference.rotary import apply_rope
from baton.engine.kernels.reference.swiglu import swiglu
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.config import ModelConfig
from baton.engine.model.rope import RopeTable
from baton.engine.model.weights import JOINED, joined
from baton.layout import Layout


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows of one pass. Sequence b owns rows query_start[b]:query_start[b + 1].

    `token_ids`, `positions`: [N] int64. A row attends to its own sequence's positions up to its own.
    `query_start`: B + 1 numbers on the host, from 0 to N.
    `block_tables`: for each cache group [B, max blocks] int64; entries that no row needs are 0.
    """

    token_ids: Tensor
    positions: Tensor
    query_start: list[int]
    block_tables: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [M, K], bias [M] or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights; q, k, v and gate, up are joined so that each is one product."""

    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    # Which cache group the layer writes to, and its number in there.
    group: int
    index: int


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the layers share within one forward pass; the lists have one entry a cache group."""

    cos: Tensor
    sin: Tensor
    cache_rows: list[Tensor]
    plans: list[list[TileBatch]]
    rows: int


class Decoder:
    """Owns the weights on the device, joined: no copy of those that `weight_places` laid out. The caller
    owns the cache and may drop `weights`.

    `layers`, `embedding`, `norm`, `head`, `rope` are for whoever runs the same model by other kernels.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        cache_layout: Layout,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.layout = cache_layout
        self.device = torch.device(device)
        self.dtype = dtype
        place = {
            layer: (number, index)
            for number, group in enumerate(cache_layout.groups)
            for index, layer in enumerate(group.layers)
        }
        self.layers = [_layer(weights, i, *place[i]) for i in range(config.num_layers)]
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.head = self.embedding if config.tied_head else weights["lm_head.weight"]
        self.rope = RopeTable(config.rope, config.head_dim, self.device)

    @torch.inference_mode()
    def forward(self, rows: Rows, cache: KVCache, between_layers: Callable[[], None] | None = None) -> Tensor:
        """Writes the rows' keys and values into the cache, and returns [N, hidden] after the final norm.

        `between_layers` is called after each layer: a host's moment, where the device is the host.
        """
        count = rows.token_ids.shape[0]
        shared = self._prepare(rows, cache)
        hidden = pad_rows(self.embedding[rows.token_ids])
        for layer in self.layers:
            hidden = hidden + self._attention(layer, hidden, shared, cache)
            hidden = hidden + self._mlp(layer, hidden)
            if between_layers is not None:
                between_layers()
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps)[:count]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] from `forward` → [M, vocab] in the model's dtype."""
        return linear(hidden, self.head)

    def _prepare(self, rows: Rows, cache: KVCache) -> _Pass:
        cos, sin = self.rope.cos_sin(rows.positions)
        starts = torch.tensor(rows.query_start, dtype=torch.int64, device=self.device)
        sequence = torch.repeat_interleave(starts.diff(), output_size=rows.token_ids.shape[0])
        cache_rows, plans = [], []
        for group, tensor, table in zip(self.layout.groups, cache.groups, rows.block_tables, strict=True):
            cache_rows.append(token_rows(tensor, table[sequence], rows.positions[:, None])[:, 0])
            plans.append(plan_attention(rows.query_start, rows.positions, table, tensor, group.window))
        return _Pass(pad_rows(cos), pad_rows(sin), cache_rows, plans, rows.token_ids.shape[0])

    def _attention(self, layer: Layer, hidden: Tensor, shared: _Pass, cache: KVCache) -> Tensor:
        config = self.config
        eps = config.rms_norm_eps
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(rms_norm(hidden, layer.attention_norm, eps))
        joined = qkv.view(-1, heads + 2 * kv_heads, config.head_dim)
        query, key = joined[:, :heads], joined[:, heads : heads + kv_heads]
        value = joined[:, heads + kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = rms_norm(query, layer.query_norm, eps), rms_norm(key, layer.key_norm, eps)
        query = apply_rope(query, shared.cos, shared.sin)
        key = apply_rope(key, shared.cos, shared.sin)
        group = cache.groups[layer.group]
        count = shared.rows
        cache_write(group, layer.index, key[:count], value[:count], shared.cache_rows[layer.group])
        attended = paged_attention(
            query, group, layer.index, shared.plans[layer.group], config.attention_scale
        )
        return layer.output(attended.view(hidden.shape[0], -1))

    def _mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        x = rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)
        return layer.down(swiglu(layer.gate_up(x)))


def _layer(weights: Mapping[str, Tensor], number: int, group: int, index: int) -> Layer:
    prefix = f"model.layers.{number}."

    def linear_of(*names: str) -> Linear:
        biases = [weights[bias] for name in names if (bias := f"{prefix}{name}.bias") in weights]
        weight = joined([weights[f"{prefix}{name}.weight"] for name in names])
        return Linear(weight, joined(biases) if biases else None)

    qkv, gate_up = JOINED
    return Layer(
        attention_norm=weights[prefix + "input_layernorm.weight"],
        qkv=linear_of(*qkv),
        query_norm=weights.get(f"{prefix}self_attn.q_norm.weight"),
        key_norm=weights.get(f"{prefix}self_attn.k_norm.weight"),
        output=linear_of("self_attn.o_proj"),
        mlp_norm=weights[prefix + "post_attention_layernorm.weight"],
        gate_up=linear_of(*gate_up),
        down=linear_of("mlp.down_proj"),
        group=group,
        index=index,
    )
