"""Names, shapes and shards of tensors in published checkpoints. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from baton.engine.model.config.model_config import ModelConfig
from baton.model_spec.split import Split


class Shard(Enum):
    """The dimension of a tensor that is divided among tensor-parallel ranks."""

    NONE = "none"
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor. `dtype`: as torch spells it; None: that of the model's weights.

    `pack`: the name of the tensor that it is rows of, together with all others of that pack in the order of
    the list; None where it is a tensor by itself. `constant`: its value in random weights, where it is not
    drawn. `order`: the stored rows as the model has them, where these differ. `expert`: the number of the
    expert that it is of; the pack is then the stack of all experts of its layer. `keeps_dtype`: a matrix
    that is never stored or held in fewer bits. `gain`: in random weights the elements of a matrix have
    the standard deviation gain / √columns. `fused`: the rows of each projection that it is made of, where
    these are several; ranks divide each of them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    pack: str | None = None
    shard: Shard = Shard.NONE
    constant: float | None = None
    order: tuple[int, ...] | None = None
    expert: int | None = None
    keeps_dtype: bool = False
    gain: float = 2.0
    fused: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """The name under which a model finds it: the pack's, or its own."""
        return self.pack or self.name

    def part(self, split: Split) -> TensorPart:
        """The part of the tensor that a rank has."""
        rows = range(self.shape[0])
        if self.shard is Shard.NONE or split.count == 1:
            return TensorPart((rows,))
        if self.shard is Shard.COLUMNS:
            return TensorPart((rows,), split.of(self.shape[1]))
        runs, first = [], 0
        for size in self.fused or self.shape[:1]:
            mine = split.of(size)
            runs.append(range(first + mine.start, first + mine.stop))
            first += size
        return TensorPart(tuple(runs))


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Some rows of a tensor, run behind run, and of each row the `columns`; None: all of them."""

    rows: tuple[range, ...]
    columns: range | None = None


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
    gain: float = 2.0,
) -> Iterator[TensorSpec]:
    """A projection's weight and bias. Where the weight is divided by columns, the first rank alone has the
    bias, which is added to the sum of all ranks once."""

    def part(kind: str, shape: tuple[int, ...], shard: Shard) -> TensorSpec:
        pack_name = pack and f"{pack}.{kind}"
        return TensorSpec(f"{name}.{kind}", shape, pack=pack_name, shard=shard, order=order, gain=gain)

    yield part("weight", (rows, columns), shard)
    if bias:
        yield part("bias", (rows,), shard if shard is Shard.ROWS else Shard.NONE)
