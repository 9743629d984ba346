"""A gated feed-forward block, SwiGLU or GEGLU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.reference.row_ops import gated
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.layers.linear import Product, Tensors, reference_product
from baton.engine.model.layers.residual import Residual
from baton.engine.model.layers.tensor_spec import Shard, TensorSpec, linear_specs

GATES = {"silu": Epilogue.SWIGLU, "gelu_pytorch_tanh": Epilogue.GEGLU}


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """A layer's dense MLP. `gate_up` has the gate's rows first. `residual`: how its output joins the
    stream."""

    gate_up: Product
    down: Product
    residual: Residual

    @property
    def inner_width(self) -> int:
        """Width of a row between the two products."""
        return self.gate_up.outputs

    def products(self) -> tuple[Product, ...]:
        """The layer's products in the order in which a step runs them."""
        return self.gate_up, self.down


def dense_mlp_specs(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    """The tensors of a layer's MLP without the norms around it; `prefix`: of the layer's names."""
    hidden, inner, mlp = config.hidden_size, config.intermediate_size, f"{prefix}mlp."
    if config.fused_projections:
        name, parts = f"{mlp}gate_up_proj.weight", (inner, inner)
        yield TensorSpec(name, (2 * inner, hidden), shard=Shard.ROWS, fused=parts)
    else:
        for name in ("gate_proj", "up_proj"):
            pack = f"{mlp}gate_up_proj"
            yield from linear_specs(f"{mlp}{name}", inner, hidden, config.mlp_bias, Shard.ROWS, pack)
    bias = config.mlp_bias and config.split.is_first
    yield from linear_specs(f"{mlp}down_proj", hidden, inner, bias, Shard.COLUMNS)


def build_dense_mlp(tensors: Tensors) -> DenseMlp:
    """Builds a layer's MLP from its tensors."""
    config = tensors.config
    residual = Residual.build(tensors, config.layer_norms.post_mlp)
    gate, norm = GATES[config.activation], tensors.norm(config.layer_norms.mlp)
    return DenseMlp(
        gate_up=Product("gate_up", tensors.linear("mlp.gate_up_proj"), gate, norm),
        down=Product("down", tensors.linear("mlp.down_proj"), residual.epilogue),
        residual=residual,
    )


def reference_dense_mlp(mlp: DenseMlp, hidden: Tensor) -> Tensor:
    """hidden [N, hidden] → the down projection's result [N, hidden] in plain torch."""
    inner = gated(reference_product(mlp.gate_up, hidden), mlp.gate_up.epilogue)
    return reference_product(mlp.down, inner)
