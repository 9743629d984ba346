"""Matrix products of a layer: weights with their bias, and what a kernel fuses with the product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
from baton.engine.kernels.reference.linear import linear
from baton.engine.kernels.reference.row_ops import rms_norm
from baton.engine.kernels.weight_stack import WeightStack
from baton.engine.model.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [N, K], as it is or in fewer bits; bias [N] or None."""

    weight: Weight
    bias: Tensor | None

    @property
    def format(self) -> str:
        """The weight's dtype as torch spells it, or the name of its format."""
        weight = self.weight
        if isinstance(weight, QuantizedWeight):
            return weight.format.name
        return str(weight.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """One matrix product of a step with all that its kernel fuses: epilogue(norm(x) · Wᵀ + bias).

    `name` identifies it in tables of measured kernels and is the same in every layer.
    """

    name: str
    linear: Linear
    epilogue: Epilogue = Epilogue.PLAIN
    norm: Norm | None = None

    @property
    def inputs(self) -> int:
        """Width of a row of x."""
        return self.linear.weight.shape[1]

    @property
    def outputs(self) -> int:
        """Width of a row of the result."""
        rows = self.linear.weight.shape[0]
        return rows // 2 if self.epilogue.gated else rows


@dataclass(frozen=True, slots=True)
class Tensors:
    """A model's tensors by name, or with `prefix` those of one layer."""

    config: ModelConfig
    weights: Mapping[str, Weight]
    prefix: str = ""

    def of_layer(self, number: int) -> Tensors:
        """Returns the tensors of one layer, by their names within it."""
        return Tensors(self.config, self.weights, f"model.layers.{number}.")

    def dense(self, name: str) -> Tensor:
        """Returns a tensor that is never quantised."""
        found = self.weights[self.prefix + name]
        if not isinstance(found, Tensor):
            raise TypeError(f"{self.prefix}{name} is quantised")
        return found

    def linear(self, name: str) -> Linear:
        """Returns a projection's weight with its bias."""
        bias = f"{name}.bias"
        has_bias = self.prefix + bias in self.weights
        return Linear(self.weights[f"{self.prefix}{name}.weight"], self.dense(bias) if has_bias else None)

    def stack(self, name: str, count: int) -> WeightStack:
        """Returns the weights of `count` experts."""
        return WeightStack(self.weights[f"{self.prefix}{name}.weight"], count)

    def norm(self, name: str) -> Norm:
        """Returns a norm with its gain, which some families store less 1."""
        stored = self.dense(f"{name}.weight")
        return Norm(1 + stored if self.config.norm_offset else stored, self.config.rms_norm_eps)


def reference_product(product: Product, x: Tensor) -> Tensor:
    """norm(x) · Wᵀ + bias in plain torch; epilogues are the caller's."""
    if product.norm is not None:
        x = rms_norm(x, product.norm.gain, product.norm.eps)
    return linear(x, product.linear.weight, product.linear.bias)
