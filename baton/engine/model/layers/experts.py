"""A mixture of experts: gated feed-forward blocks of which each token takes some, by its layer's router."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.reference.experts import NO_EXPERT, mix, route
from baton.engine.kernels.reference.row_ops import rms_norm
from baton.engine.kernels.weight_stack import WeightStack
from baton.engine.model.config.experts_config import ExpertsConfig
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.layers.linear import Product, Tensors
from baton.engine.model.layers.mlp import GATES
from baton.engine.model.layers.residual import Residual
from baton.engine.model.layers.tensor_spec import Shard, TensorSpec


@dataclass(frozen=True, slots=True)
class ExpertsMlp:
    """A layer's mixture. `router` [E, hidden]; `gate_up` [E, 2 · inner, hidden] with each gate's rows first;
    `down` [E, hidden, inner]. `norm`: of what router and experts take. `residual`: how the output joins the
    stream. `taken` [E] int64: rows that each expert has been taken by so far."""

    router: Tensor
    gate_up: WeightStack
    down: WeightStack
    top_k: int
    normalise: bool
    gate: Epilogue
    norm: Norm
    residual: Residual
    taken: Tensor

    @property
    def inner_width(self) -> int:
        """Width of a row between an expert's two products."""
        return self.down.shape[2]

    def products(self) -> tuple[Product, ...]:
        """An empty tuple: the matrices that a row is multiplied by are known on the device alone."""
        return ()


def experts_specs(config: ModelConfig, experts: ExpertsConfig, prefix: str) -> Iterator[TensorSpec]:
    """The tensors of a layer's mixture without the norms around it; `prefix`: of the layer's names."""
    hidden, inner, names = config.hidden_size, experts.intermediate_size, experts.names
    block = f"{prefix}{names.block}."
    yield TensorSpec(f"{block}gate.weight", (experts.count, hidden), keeps_dtype=True)
    for expert in range(experts.count):
        own = f"{block}experts.{expert}."
        for name in (names.gate, names.up):
            pack, shape = f"{block}experts.gate_up.weight", (inner, hidden)
            yield TensorSpec(f"{own}{name}.weight", shape, pack=pack, shard=Shard.ROWS, expert=expert)
        pack, shape = f"{block}experts.down.weight", (hidden, inner)
        yield TensorSpec(f"{own}{names.down}.weight", shape, pack=pack, shard=Shard.COLUMNS, expert=expert)


def build_experts(tensors: Tensors, experts: ExpertsConfig) -> ExpertsMlp:
    """Builds a layer's mixture from its tensors."""
    config, block = tensors.config, experts.names.block
    router = tensors.dense(f"{block}.gate.weight")
    return ExpertsMlp(
        router=router,
        gate_up=tensors.stack(f"{block}.experts.gate_up", experts.count),
        down=tensors.stack(f"{block}.experts.down", experts.count),
        top_k=experts.top_k,
        normalise=experts.normalise,
        gate=GATES[config.activation],
        norm=tensors.norm(config.layer_norms.mlp),
        residual=Residual.build(tensors, config.layer_norms.post_mlp),
        taken=torch.zeros(experts.count, dtype=torch.int64, device=router.device),
    )


def reference_experts(mlp: ExpertsMlp, hidden: Tensor, count: int) -> Tensor:
    """hidden [N, hidden] → the mixture's result [N, hidden] in plain torch: zeros from row `count` on, which
    take no expert."""
    normed = rms_norm(hidden, mlp.norm.gain, mlp.norm.eps)
    ids, weights = route(normed, mlp.router, mlp.top_k, normalise=mlp.normalise)
    ids[count:] = NO_EXPERT
    mlp.taken.add_(torch.bincount(ids[:count].flatten(), minlength=len(mlp.taken)))
    return mix(normed, ids, weights, mlp.gate_up, mlp.down, mlp.gate)
