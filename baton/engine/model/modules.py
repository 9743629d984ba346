"""A model: the weights on the device, composed into layers.

The reference forward pass and both GPU passes run the same modules; what is sized, warmed up or measured for
each matrix product iterates `Model.products`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from baton.engine.kernels.quantized_weight import Weight
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.layers.layer import build_layer
from baton.engine.model.layers.linear import Linear, Product, Tensors
from baton.engine.model.rope import RopeTable
from baton.engine.model.tensors import EMBEDDING, HEAD
from baton.engine.model.weights import packed
from baton.model_spec.layout import Layout


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a model. `weights`: of embedding, head and matrices that are not quantised; `activations`: of
    what layers pass on, biases and norms; `cache`: of keys and values, or float8_e4m3fn where they are
    quantised."""

    weights: torch.dtype
    activations: torch.dtype
    cache: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype, cache: torch.dtype | None = None) -> Precision:
        """One dtype for all three, or for all but the cache."""
        return cls(dtype, dtype, cache or dtype)


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
        tensors = Tensors(config, packed(config, weights))
        self.nbytes = sum(tensor.nbytes for tensor in tensors.weights.values())
        self.layers = [build_layer(tensors, i, *place[i]) for i in range(config.num_layers)]
        self.embedding = tensors.dense(EMBEDDING)
        self.norm = tensors.norm("model.norm")
        rows = config.head_rows
        head = tensors.weights.get(HEAD, self.embedding[rows.start : rows.stop])
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
