"""A layer: a kind of attention and a kind of MLP. A new kind is a file beside `attention` and `mlp`, a member
of the union here, and a branch in each function of this file and in `forward.layer_program.run_layers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.layers.attention import (
    Attention,
    ReferenceRows,
    attention_specs,
    build_attention,
    reference_attention,
)
from baton.engine.model.layers.experts import (
    ExpertsMlp,
    build_experts,
    experts_specs,
    reference_experts,
)
from baton.engine.model.layers.linear import Product, Tensors
from baton.engine.model.layers.mlp import DenseMlp, build_dense_mlp, dense_mlp_specs, reference_dense_mlp
from baton.engine.model.layers.residual import reference_add
from baton.engine.model.layers.tensor_spec import TensorSpec, norm_spec
from baton.engine.parallel.ranks_in_turn import RankPass

Mlp = DenseMlp | ExpertsMlp
"""The kinds of MLP that a layer may have."""


@dataclass(frozen=True, slots=True)
class Layer:
    """hidden += attention(hidden), then hidden += mlp(hidden); each norms its own input."""

    attention: Attention
    mlp: Mlp

    def products(self) -> tuple[Product, ...]:
        """The layer's products in the order in which a step runs them."""
        return *self.attention.products(), *self.mlp.products()


def layer_specs(config: ModelConfig, number: int) -> Iterator[TensorSpec]:
    """The tensors of layer `number`."""
    prefix = f"model.layers.{number}."
    for name in config.layer_norms.names():
        yield norm_spec(config, f"{prefix}{name}.weight", config.hidden_size)
    yield from attention_specs(config, prefix)
    experts = config.experts_of(number)
    if experts is None:
        yield from dense_mlp_specs(config, prefix)
    else:
        yield from experts_specs(config, experts, prefix)


def build_layer(tensors: Tensors, number: int, group: int, index: int) -> Layer:
    """Builds layer `number`, whose keys and values are layer `index` of cache group `group`."""
    own, experts = tensors.of_layer(number), tensors.config.experts_of(number)
    mlp = build_dense_mlp(own) if experts is None else build_experts(own, experts)
    return Layer(build_attention(own, number, group, index), mlp)


def reference_layer(
    config: ModelConfig, layer: Layer, hidden: Tensor, rows: ReferenceRows, cache: KVCache
) -> RankPass[Tensor]:
    """hidden [N, hidden] → [N, hidden] behind the layer, in plain torch; writes keys and values. A rank's
    results are partial sums, of which all are added before they join the stream."""
    attention, mlp = layer.attention, layer.mlp
    result = yield reference_attention(config, attention, hidden, rows, cache)
    hidden = reference_add(attention.residual, hidden, result)
    match mlp:
        case DenseMlp():
            result = yield reference_dense_mlp(mlp, hidden)
        case ExpertsMlp():
            result = yield reference_experts(mlp, hidden, rows.count)
    return reference_add(mlp.residual, hidden, result)
