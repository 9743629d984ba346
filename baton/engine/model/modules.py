"""A model as modules: the weights on the device, and how they are composed into layers.

The reference forward pass and both GPU passes run the same modules; what is sized, warmed up or measured for
each matrix product iterates `Model.products`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
from baton.engine.model.config import ModelConfig
from baton.engine.model.rope import RopeTable
from baton.engine.model.tensors import EMBEDDING, HEAD
from baton.engine.model.weights import packed
from baton.layout import Layout


@dataclass(frozen=True, slots=True)
class Precision:
    """`weights`: of embedding, head and matrices that are not quantised; `activations`: of what layers pass
    on, biases and norms; `cache`: of keys and values, or float8_e4m3fn where they are quantised."""

    weights: torch.dtype
    activations: torch.dtype
    cache: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype, cache: torch.dtype | None = None) -> Precision:
        """One dtype for all three, or for all but the cache."""
        return cls(dtype, dtype, cache or dtype)


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
    """One matrix product of a step with all that its kernel fuses: epilogue(norm(x) · Wᵀ + bias). With
    `post_norm` its RMSNorm is added to what the output holds.

    `name` identifies it in tables of measured kernels and is the same in every layer.
    """

    name: str
    linear: Linear
    epilogue: Epilogue = Epilogue.PLAIN
    norm: Norm | None = None
    post_norm: Norm | None = None

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
class Attention:
    """A layer's attention. `head_norms`: gains [head dim] of the query's and the key's RMSNorm.

    `group`: the cache group that its keys and values are written to; `index`: the layer's number in there.
    `rope`: which of the model's rotary embeddings it uses.
    """

    qkv: Product
    output: Product
    head_norms: tuple[Tensor, Tensor] | None
    group: int
    index: int
    rope: int

    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.output


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """A gated feed-forward block; `gate_up` has the gate's rows first."""

    gate_up: Product
    down: Product

    def products(self) -> tuple[Product, ...]:
        return self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class Layer:
    """hidden += attention(hidden), then hidden += mlp(hidden); each norms its own input."""

    attention: Attention
    mlp: DenseMlp

    def products(self) -> tuple[Product, ...]:
        """In the order in which a step runs them."""
        return *self.attention.products(), *self.mlp.products()


class Model:
    """Owns a model's weights on a device, `nbytes` in all; the caller owns the cache and may drop `weights`.

    Weights that `weight_places` laid out are packed without a copy. `head` norms its input.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        layout: Layout,
        device: torch.device | str,
        precision: Precision,
    ) -> None:
        self.config = config
        self.layout = layout
        self.device = torch.device(device)
        self.precision = precision
        place = {
            layer: (number, index)
            for number, group in enumerate(layout.groups)
            for index, layer in enumerate(group.layers)
        }
        tensors = _Tensors(packed(config, weights))
        self.nbytes = sum(tensor.nbytes for tensor in tensors.weights.values())
        self.layers = [_layer(config, tensors, i, *place[i]) for i in range(config.num_layers)]
        self.embedding = tensors.dense(EMBEDDING)
        self.norm = Norm(_gain(config, tensors.dense("model.norm.weight")), config.rms_norm_eps)
        head = tensors.weights.get(HEAD, self.embedding)
        self.head = Product("head", Linear(head, None), norm=self.norm)
        self.ropes = [RopeTable(rope, config.head_dim, self.device) for rope in config.ropes]
        scale = torch.tensor(config.embedding_scale, dtype=torch.float32)
        self.embedding_scale = float(scale.to(precision.weights))

    def products(self) -> Iterator[Product]:
        """All matrix products of a step, in the order in which it runs them."""
        for layer in self.layers:
            yield from layer.products()
        yield self.head

    def product_kinds(self) -> list[Product]:
        """One product for each distinct name, shape, format and presence of a bias, in the order of
        `products`."""
        kinds: dict[tuple[object, ...], Product] = {}
        for product in self.products():
            linear = product.linear
            key = product.name, tuple(linear.weight.shape), linear.format, linear.bias is None
            kinds.setdefault(key, product)
        return list(kinds.values())


@dataclass(frozen=True, slots=True)
class _Tensors:
    """A model's tensors by name."""

    weights: Mapping[str, Weight]

    def dense(self, name: str) -> Tensor:
        """One that is never quantised."""
        found = self.weights[name]
        if not isinstance(found, Tensor):
            raise TypeError(f"{name} is quantised")
        return found

    def linear(self, name: str) -> Linear:
        bias = f"{name}.bias"
        return Linear(self.weights[f"{name}.weight"], self.dense(bias) if bias in self.weights else None)


def _gain(config: ModelConfig, stored: Tensor) -> Tensor:
    return 1 + stored if config.norm_offset else stored


def _layer(config: ModelConfig, tensors: _Tensors, number: int, group: int, index: int) -> Layer:
    prefix = f"model.layers.{number}."

    def linear(name: str) -> Linear:
        return tensors.linear(prefix + name)

    def norm(name: str) -> Norm:
        return Norm(_gain(config, tensors.dense(f"{prefix}{name}.weight")), config.rms_norm_eps)

    def residual(product: str, name: str, post_norm: str | None) -> Product:
        """The product whose result joins the residual stream: added by its kernel, or normed first."""
        if post_norm is None:
            return Product(product, linear(name), Epilogue.RESIDUAL)
        return Product(product, linear(name), post_norm=norm(post_norm))

    norms, head_norms = config.layer_norms, None
    if config.qk_norm:
        head_norms = norm("self_attn.q_norm").gain, norm("self_attn.k_norm").gain
    gated = {"silu": Epilogue.SWIGLU, "gelu_pytorch_tanh": Epilogue.GEGLU}[config.activation]
    return Layer(
        Attention(
            qkv=Product("qkv", linear("self_attn.qkv_proj"), norm=norm(norms.attention)),
            output=residual("output", "self_attn.o_proj", norms.post_attention),
            head_norms=head_norms,
            group=group,
            index=index,
            rope=config.rope_of(number),
        ),
        DenseMlp(
            gate_up=Product("gate_up", linear("mlp.gate_up_proj"), gated, norm(norms.mlp)),
            down=residual("down", "mlp.down_proj", norms.post_mlp),
        ),
    )
