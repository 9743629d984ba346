"""The tensors of a model: their names in published checkpoints, their shapes, and the matrices that they are
parts of. Memory, loading, digests and random weights follow from it."""

from __future__ import annotations

from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.layers.layer import layer_specs
from baton.engine.model.layers.tensor_spec import Shard, TensorSpec, norm_spec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tensor_specs(config: ModelConfig, *, own_head: bool = False) -> list[TensorSpec]:
    """Every tensor that the model has. `own_head`: a head that is tied to the embedding has a matrix of its
    own, in another format, which no checkpoint stores."""
    vocabulary = config.vocab_size, config.hidden_size
    specs = [TensorSpec(EMBEDDING, vocabulary, shard=Shard.ROWS)]
    for number in range(config.num_layers):
        specs += layer_specs(config, number)
    specs.append(norm_spec(config, "model.norm.weight", config.hidden_size))
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


def half_context(config: ModelConfig) -> float:
    """Tokens of context at which attention takes as long as the products."""
    width = config.num_heads * config.head_dim
    weights = sum(rows * columns for rows, columns in layer_matrices(config).values())
    return weights / (2 * width * config.num_layers)


def in_layers(spec: TensorSpec) -> bool:
    """Whether it is a matrix that a layer multiplies by."""
    return len(spec.shape) == 2 and spec.name.startswith(_LAYERS)


_LAYERS = "model.layers."
