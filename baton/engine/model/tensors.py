"""The tensors of a model: their names in published checkpoints, their shapes, and the matrices that they are
parts of. Memory, loading, digests and random weights follow from it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from baton.engine.model.config import ModelConfig


class Shard(Enum):
    """Which dimension of a tensor is divided among tensor-parallel ranks."""

    NONE = "none"
    ROWS = "rows"
    COLUMNS = "columns"


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


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


def tensor_specs(config: ModelConfig, *, own_head: bool = False) -> list[TensorSpec]:
    """Every tensor that the model has. `own_head`: a head that is tied to the embedding has a matrix of its
    own, in another format, which no checkpoint stores."""
    vocabulary = config.vocab_size, config.hidden_size
    specs = [TensorSpec(EMBEDDING, vocabulary, shard=Shard.ROWS)]
    for number in range(config.num_layers):
        specs += _layer(config, f"{_LAYERS}{number}.")
    specs.append(_norm(config, "model.norm.weight", config.hidden_size))
    if own_head or not config.tied_head:
        specs.append(TensorSpec(HEAD, vocabulary, shard=Shard.ROWS))
    return specs


def layer_matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of every matrix that the layers multiply by, packed ones as one, by name."""
    matrices: dict[str, tuple[int, int]] = {}
    for spec in tensor_specs(config):
        if in_layers(spec):
            rows, columns = spec.shape
            matrices[spec.key] = matrices.get(spec.key, (0, 0))[0] + rows, columns
    return matrices


def in_layers(spec: TensorSpec) -> bool:
    """Whether it is a matrix that a layer multiplies by."""
    return len(spec.shape) == 2 and spec.name.startswith(_LAYERS)


_LAYERS = "model.layers."


def _layer(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name in config.layer_norms.names():
        yield _norm(config, f"{prefix}{name}.weight", hidden)
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    if config.fused_projections:
        shape = queries + 2 * keys, hidden
        order = _rotary_order(config, config.num_heads + config.num_kv_heads, config.num_kv_heads)
        yield TensorSpec(f"{attention}qkv_proj.weight", shape, shard=Shard.ROWS, order=order)
        yield TensorSpec(f"{mlp}gate_up_proj.weight", (2 * inner, hidden), shard=Shard.ROWS)
    else:
        query_order, key_order = (_rotary_order(config, n) for n in (config.num_heads, config.num_kv_heads))
        projections = ("q_proj", queries, query_order), ("k_proj", keys, key_order), ("v_proj", keys, None)
        for name, rows, order in projections:
            pack = f"{attention}qkv_proj"
            yield from _linear(f"{attention}{name}", rows, hidden, config.qkv_bias, Shard.ROWS, pack, order)
        for name in ("gate_proj", "up_proj"):
            pack = f"{mlp}gate_up_proj"
            yield from _linear(f"{mlp}{name}", inner, hidden, config.mlp_bias, Shard.ROWS, pack)
    yield from _linear(f"{attention}o_proj", hidden, queries, config.output_bias, Shard.COLUMNS)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield _norm(config, f"{attention}{name}.weight", config.head_dim, _rotary_order(config, 1))
    yield from _linear(f"{mlp}down_proj", hidden, inner, config.mlp_bias, Shard.COLUMNS)


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


def _norm(config: ModelConfig, name: str, size: int, order: tuple[int, ...] | None = None) -> TensorSpec:
    """A norm's gain. One that is stored less 1 is kept as float32, since 1 plus it is not rounded."""
    dtype, constant = ("float32", 0.0) if config.norm_offset else (None, 1.0)
    return TensorSpec(name, (size,), dtype, constant=constant, order=order)


def _linear(
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
