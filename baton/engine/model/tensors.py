"""The tensors of a model: their names in published checkpoints, their shapes, and the matrices that they are
parts of. Memory, loading, digests and random weights follow from it."""

from __future__ import annotations

import math
from functools import lru_cache

from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.layers.layer import layer_specs
from baton.engine.model.layers.tensor_spec import Shard, TensorSpec, norm_spec
from baton.perf_model.prefill_fit import LEAST_ROWS_GPU

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@lru_cache(maxsize=8)
def tensor_specs(config: ModelConfig, *, own_head: bool = False) -> tuple[TensorSpec, ...]:
    """Every tensor that the model has, or one rank's part of each; the embedding is whole on all of them.
    `own_head`: a head that is tied to the embedding has a matrix of its own, in another format, which no
    checkpoint stores."""
    vocabulary = config.vocab_size, config.hidden_size
    # In a mixture the embedding is as large as what layers add to it, so that routing depends on the token
    # (`attention_specs`). A head that is tied to so large an embedding would repeat each token.
    large = config.experts is not None and not config.tied_head
    gain = math.sqrt(config.hidden_size) if large else 2.0
    specs = [TensorSpec(EMBEDDING, vocabulary, gain=gain)]
    for number in range(config.num_layers):
        specs += layer_specs(config, number)
    specs.append(norm_spec(config, "model.norm.weight", config.hidden_size))
    if own_head or not config.tied_head:
        head = len(config.head_rows), config.hidden_size
        specs.append(TensorSpec(HEAD, head, shard=Shard.ROWS))
    return tuple(specs)


def layer_matrices(config: ModelConfig, *, experts: bool = True) -> dict[str, tuple[int, int]]:
    """Rows and columns of every matrix that the layers multiply by, packed ones as one, by name; of a layer's
    experts those of one, or with `experts` False none."""
    matrices: dict[str, tuple[int, int]] = {}
    for spec in tensor_specs(config):
        if in_layers(spec) and (spec.expert is None or (experts and spec.expert == 0)):
            rows, columns = spec.shape
            matrices[spec.key] = matrices.get(spec.key, (0, 0))[0] + rows, columns
    return matrices


def half_context(config: ModelConfig) -> float:
    """Tokens of context at which attention takes as long as the products."""
    width = config.num_heads * config.head_dim
    return active_weights(config) / (2 * width * config.num_layers)


def active_weights(config: ModelConfig) -> int:
    """Elements of the layers' matrices that a token is multiplied by: of the experts as many as it takes."""
    taken = 0 if config.experts is None else config.experts.top_k
    matrices = filter(in_layers, tensor_specs(config))
    return sum(math.prod(one.shape) for one in matrices if one.expert is None or one.expert < taken)


def total_weights(config: ModelConfig) -> int:
    """Elements of the layers' matrices, all experts included."""
    return sum(math.prod(one.shape) for one in filter(in_layers, tensor_specs(config)))


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """Elements of all tensors: in all, and without the experts that a token does not take."""
    taken = 0 if config.experts is None else config.experts.top_k
    total = active = 0
    for spec in tensor_specs(config):
        count = math.prod(spec.shape)
        total += count
        active += count if spec.expert is None or spec.expert < taken else 0
    return total, active


def least_rows(config: ModelConfig, dense_rows: int) -> int:
    """Rows of a pass that take no longer than fewer, since the weights are read in any case; `dense_rows`: of
    a model whose rows are multiplied by all weights. In passes of a mixture all experts are read, and each
    row has the arithmetic of those that it takes."""
    return round(dense_rows * total_weights(config) / active_weights(config))


def busy_rows(config: ModelConfig, device_type: str) -> int:
    """`least_rows` of a model on a device of this type; 0 on a CPU, where none are known to be free."""
    return least_rows(config, LEAST_ROWS_GPU) if device_type == "cuda" else 0


def in_layers(spec: TensorSpec) -> bool:
    """True for a matrix that a layer multiplies by."""
    return len(spec.shape) == 2 and spec.name.startswith(_LAYERS)


_LAYERS = "model.layers."
