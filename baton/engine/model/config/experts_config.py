"""The configuration of a mixture of experts: how many experts there are, how many a token takes, and in which
layers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names, in checkpoints, of a layer's mixture, and of the three projections of each expert."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """`count` experts of `intermediate_size`, of which each token takes the `top_k` that have the largest
    share of the softmax over its router's logits. `normalise`: the shares of those taken are divided by their
    sum.

    `dense_layers`: the layers that have one MLP, of the model's own intermediate size, in their place.
    """

    count: int
    top_k: int
    intermediate_size: int
    normalise: bool
    dense_layers: tuple[int, ...] = ()
    names: ExpertNames = ExpertNames()
