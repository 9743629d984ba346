"""The configuration of a model: shapes, rotary embeddings, windows, biases, norms. Torch-free.

`families` reads it from a model's folder. What the router needs of the same files is in
`baton.model_spec.model_files`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from baton.engine.model.config.experts_config import ExpertsConfig
from baton.engine.model.config.rope_config import LATER_FIELDS, RopeConfig
from baton.engine.model.quantization.scheme import Scheme
from baton.model_spec.layout import CacheGroup, Layout, key_value_planes
from baton.model_spec.split import WHOLE, Split


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names, in checkpoints, of a layer's norms: of what attention and MLP take, and of what they yield,
    where that is normed before it is added to the residual stream."""

    attention: str = "input_layernorm"
    post_attention: str | None = None
    mlp: str = "post_attention_layernorm"
    post_mlp: str | None = None

    @property
    def of_results(self) -> bool:
        """True where any result is normed before it is added."""
        return self.post_attention is not None or self.post_mlp is not None

    def names(self) -> list[str]:
        """Names of the norms that a layer has."""
        return [name for name in dataclasses.astuple(self) if name is not None]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model. `layer_windows[i]`: the tokens layer i sees, its own included; None = all."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    # Fields with defaults are left out of `digest` where they have them.
    activation: str = "silu"
    # Attention scores are multiplied by this to the power of -0.5; None: by the head's size.
    query_scalar: float | None = None
    # The rotary embedding of layers with a window, where it differs.
    window_rope: RopeConfig | None = None
    # What embeddings are multiplied by, as rounded to the dtype of the weights.
    embedding_scale: float = 1.0
    layer_norms: LayerNorms = LayerNorms()
    # Whether checkpoints store the gains of norms less 1.
    norm_offset: bool = False
    # Whether checkpoints store q, k, v and gate, up as one tensor each.
    fused_projections: bool = False
    # How the checkpoint's matrices are quantised.
    quantization: Scheme | None = None
    # The experts that are the MLP of most or all layers.
    experts: ExpertsConfig | None = None
    # Which part of the model this is: of heads, of the MLP's inner width, of the head's rows.
    split: Split = WHOLE

    def for_context(self, tokens: int) -> ModelConfig:
        """The configuration of a worker whose sequences have up to `tokens` tokens."""
        return dataclasses.replace(self, rope=self.rope.for_context(tokens))

    def of_rank(self, split: Split) -> ModelConfig:
        """The part of the model that one of a worker's devices computes. What is divided must divide evenly,
        except for the vocabulary (`baton.engine.model.split_checks`)."""
        return dataclasses.replace(
            self,
            num_heads=self.num_heads // split.count,
            num_kv_heads=self.num_kv_heads // split.count,
            intermediate_size=self.intermediate_size // split.count,
            split=split,
        )

    @property
    def head_rows(self) -> range:
        """The tokens of the vocabulary whose logits this part of the model computes."""
        return self.split.of(self.vocab_size)

    @property
    def attention_scale(self) -> float:
        return float((self.query_scalar or self.head_dim) ** -0.5)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotary embeddings; that of layers with a window is the second, where it differs."""
        return (self.rope,) if self.window_rope is None else (self.rope, self.window_rope)

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The experts of a layer; None where its MLP is dense."""
        experts = self.experts
        return None if experts is None or layer in experts.dense_layers else experts

    def rope_of(self, layer: int) -> int:
        """Index in `ropes` of the rotary embedding that a layer uses."""
        return int(self.window_rope is not None and self.layer_windows[layer] is not None)

    def layout(self, block_tokens: int, dtype_name: str) -> Layout:
        """One cache group for each distinct window. `dtype_name`: of the cache, which may be
        `baton.model_spec.layout.FP8`."""
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be positive, got {block_tokens}")
        planes = key_value_planes(dtype_name, self.num_kv_heads, self.head_dim)
        layers_of: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.layer_windows):
            layers_of.setdefault(window, []).append(layer)
        groups = tuple(
            CacheGroup(tuple(layers), planes, block_tokens, window) for window, layers in layers_of.items()
        )
        return Layout(groups)

    def digest(self) -> bytes:
        """SHA-256 of the fields: equal exactly where two configurations compute the same function."""
        values = dataclasses.asdict(self)
        for field in dataclasses.fields(self):
            if getattr(self, field.name) == field.default:
                del values[field.name]
        for rope in (values["rope"], values.get("window_rope", {})):
            for name in [name for name, default in LATER_FIELDS.items() if rope.get(name) == default]:
                del rope[name]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()
