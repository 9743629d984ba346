"""Names, shapes and shards of tensors in published checkpoints. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from baton.engine.model.config.model_config import ModelConfig


class Shard(Enum):
    """Which dimension of a tensor is divided among tensor-parallel ranks."""

    NONE = "none"
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor. `dtype`: as torch spells it; None: that of the model's weights.

    `pack`: the name of the tensor that it is rows of, together with all others of that pack in the order of
    the list; None where it is a tensor by itself. `constant`: its value in random weights, where it is not
    drawn. `order`: the stored rows as the model has them, where these differ.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    pack: str | None = None
    shard: Shard = Shard.NONE
    constant: float | None = None
    order: tuple[int, ...] | None = None

    @property
    def key(self) -> str:
        """The name under which a model finds it: the pack's, or its own."""
        return self.pack or self.name


def norm_spec(config: ModelConfig, name: str, size: int, order: tuple[int, ...] | None = None) -> TensorSpec:
    """A norm's gain. One that is stored less 1 is kept as float32, since 1 plus it is not rounded."""
    dtype, constant = ("float32", 0.0) if config.norm_offset else (None, 1.0)
    return TensorSpec(name, (size,), dtype, constant=constant, order=order)


def linear_specs(
    name: str,
    rows: int,
    columns: int,
    bias: bool,
    shard: Shard,
    pack: str | None = None,
    order: tuple[int, ...] | None = None,
) -> Iterator[TensorSpec]:
    """A projection's weight and bias. One that is divided by columns adds its bias on every rank's sum
    once."""

    def part(kind: str, shape: tuple[int, ...], shard: Shard) -> TensorSpec:
        return TensorSpec(f"{name}.{kind}", shape, pack=pack and f"{pack}.{kind}", shard=shard, order=order)

    yield part("weight", (rows, columns), shard)
    if bias:
        yield part("bias", (rows,), shard if shard is Shard.ROWS else Shard.NONE)
