"""Attention with grouped queries over the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.fusion import Norm
from baton.engine.kernels.reference.cache_write import cache_write
from baton.engine.kernels.reference.paged_attention import TileBatch, paged_attention
from baton.engine.kernels.reference.row_ops import apply_rope, rms_norm
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.layers.linear import Product, Tensors, reference_product
from baton.engine.model.layers.residual import Residual
from baton.engine.model.layers.tensor_spec import Shard, TensorSpec, linear_specs, norm_spec


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer's attention. `head_norms`: gains [head dim] of the query's and the key's RMSNorm.

    `group`: the cache group that its keys and values are written to; `index`: the layer's number in there.
    `rope`: which of the model's rotary embeddings it uses. `residual`: how its output joins the stream.
    """

    qkv: Product
    output: Product
    residual: Residual
    head_norms: tuple[Tensor, Tensor] | None
    group: int
    index: int
    rope: int

    def products(self) -> tuple[Product, ...]:
        """The layer's products in the order in which a step runs them."""
        return self.qkv, self.output


def attention_specs(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    """The tensors of a layer's attention without the norms around it; `prefix`: of the layer's names."""
    hidden, attention = config.hidden_size, f"{prefix}self_attn."
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.fused_projections:
        shape = queries + 2 * keys, hidden
        order = _rotary_order(config, config.num_heads + config.num_kv_heads, config.num_kv_heads)
        name, parts = f"{attention}qkv_proj.weight", (queries, keys, keys)
        yield TensorSpec(name, shape, shard=Shard.ROWS, order=order, fused=parts)
    else:
        query_order, key_order = (_rotary_order(config, n) for n in (config.num_heads, config.num_kv_heads))
        projections = ("q_proj", queries, query_order), ("k_proj", keys, key_order), ("v_proj", keys, None)
        pack = f"{attention}qkv_proj"
        for name, rows, order in projections:
            yield from linear_specs(
                f"{attention}{name}", rows, hidden, config.qkv_bias, Shard.ROWS, pack, order
            )
    # With random weights all rows of a prompt attend to much the same. Beside experts that part is small, or
    # they would take the same ones.
    gain = 2.0 if config.experts is None else 0.5
    name, bias = f"{attention}o_proj", config.output_bias and config.split.is_first
    yield from linear_specs(name, hidden, queries, bias, Shard.COLUMNS, gain=gain)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield norm_spec(config, f"{attention}{name}.weight", config.head_dim, _rotary_order(config, 1))


def build_attention(tensors: Tensors, number: int, group: int, index: int) -> Attention:
    """Builds the attention of layer `number` from its tensors."""
    config, head_norms = tensors.config, None
    if config.qk_norm:
        head_norms = tensors.norm("self_attn.q_norm").gain, tensors.norm("self_attn.k_norm").gain
    residual = Residual.build(tensors, config.layer_norms.post_attention)
    norm: Norm = tensors.norm(config.layer_norms.attention)
    return Attention(
        qkv=Product("qkv", tensors.linear("self_attn.qkv_proj"), norm=norm),
        output=Product("output", tensors.linear("self_attn.o_proj"), residual.epilogue),
        residual=residual,
        head_norms=head_norms,
        group=group,
        index=index,
        rope=config.rope_of(number),
    )


@dataclass(frozen=True, slots=True)
class ReferenceRows:
    """Data that the layers of one reference pass share. `rotary`: cos and sin for each rotary embedding of
    the model; `cache_rows`, `plans`: for each cache group; `count`: rows that are not padding."""

    rotary: list[tuple[Tensor, Tensor]]
    cache_rows: list[Tensor]
    plans: list[list[TileBatch]]
    count: int


def reference_attention(
    config: ModelConfig, attention: Attention, hidden: Tensor, rows: ReferenceRows, cache: KVCache
) -> Tensor:
    """hidden [N, hidden] → the output projection's result [N, hidden], in plain torch; writes keys and
    values."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    qkv = reference_product(attention.qkv, hidden).view(-1, heads + 2 * kv_heads, config.head_dim)
    query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    if attention.head_norms is not None:
        query, key = (
            rms_norm(x, gain, config.rms_norm_eps)
            for x, gain in zip((query, key), attention.head_norms, strict=True)
        )
    rotary = rows.rotary[attention.rope]
    query, key = apply_rope(query, *rotary), apply_rope(key, *rotary)
    number, index, count = attention.group, attention.index, rows.count
    group, scales = cache.groups[number], cache.scales[number]
    cache_write(group, index, key[:count], value[:count], rows.cache_rows[number], scales)
    attn_out = paged_attention(query, group, index, rows.plans[number], config.attention_scale, scales)
    return reference_product(attention.output, attn_out.view(hidden.shape[0], -1))


def _rotary_order(config: ModelConfig, rotated: int, others: int = 0) -> tuple[int, ...] | None:
    """The rows of `rotated` heads' projection, and behind them those of `others`, in the order that the
    kernels rotate in, where only the first dimensions of a head are rotated; None where all are.

    The kernels rotate dimension i with i + head dim / 2. The pairs that are rotated come first in each half
    and the others behind them, in queries and keys alike, so that their products are the same.
    """
    dim = config.head_dim
    half, turned = dim // 2, int(dim * config.rope.rotated_share) // 2
    if turned == half:
        return None
    rest = half - turned
    head = (
        *range(turned), *range(2 * turned, 2 * turned + rest),
        *range(turned, 2 * turned), *range(2 * turned + rest, dim),
    )  # fmt: skip
    order = [first * dim + row for first in range(rotated) for row in head]
    return (*order, *range(rotated * dim, (rotated + others) * dim))
