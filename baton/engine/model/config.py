"""What a model is, read from its folder's `config.json`: shapes, rope, windows, biases. Torch-free.

Keys of old and new transformers releases are both understood; whatever would silently change the answers is
refused. What the router needs of the same files is in `baton.model_files`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.engine.model.rope_config import (
    LATER_FIELDS,
    RopeConfig,
    read_partial_rope,
    read_rope,
    read_rope_by_layer_type,
)
from baton.layout import DTYPE_BYTES, CacheGroup, Layout, Plane
from baton.model_files import ConfigFile, ModelLimits

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}
_ACTIVATIONS = {"gemma3": "gelu_pytorch_tanh"}
_HEAD_DIMS = {"qwen3": 128, "gemma3": 256}
_MISTRAL_WINDOW = 4096
_FIRST_WINDOW_LAYER = 28
_GEMMA_QUERY_SCALAR = 256.0
_GEMMA_PATTERN = 6


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
    local_rope: RopeConfig | None = None
    # What embeddings are multiplied by, as rounded to the dtype of the weights.
    embedding_scale: float = 1.0
    # Gemma: norms behind attention and MLP too, and all gains stored less 1.
    post_norms: bool = False
    norm_offset: bool = False
    # Whether checkpoints store q, k, v and gate, up as one tensor each.
    fused_projections: bool = False

    @classmethod
    def load(cls, folder: str | Path) -> ModelConfig:
        """Reads `config.json` and, for the end-of-sequence ids, `generation_config.json` if there is one.

        Raises BatonError(INVALID) with one line that names file and key.
        """
        file = ConfigFile.read(Path(folder) / "config.json")
        family = _family(file)
        if file.get("quantization_config") is not None:
            raise file.error("quantization_config", "quantised checkpoints are not supported")
        activation = _activation(file, family)
        heads = file.positive("num_attention_heads")
        kv_heads = file.positive("num_key_value_heads", heads)
        if heads % kv_heads:
            raise file.error("num_key_value_heads", f"{kv_heads} does not divide the {heads} attention heads")
        head_dim = _head_dim(file, family, heads)
        layers = file.positive("num_hidden_layers")
        limits = ModelLimits.read(file)
        gemma = family == "gemma3"
        rope, local_rope = _ropes(file, family, limits.max_positions, head_dim)
        attention_bias = family in ("llama", "qwen3", "gemma3") and file.flag("attention_bias", False)
        return cls(
            family=family,
            vocab_size=limits.vocab_size,
            hidden_size=file.positive("hidden_size"),
            intermediate_size=file.positive("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=limits.max_positions,
            rms_norm_eps=file.positive_number("rms_norm_eps", 1e-6),
            rope=rope,
            layer_windows=_layer_windows(file, family, layers),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family == "llama" and file.flag("mlp_bias", False),
            qk_norm=family in ("qwen3", "gemma3"),
            tied_head=file.flag("tie_word_embeddings", gemma),
            eos_token_ids=limits.eos_token_ids,
            dtype=_dtype_name(file),
            activation=activation,
            fused_projections=family == "phi3",
            **(_gemma_fields(file) if gemma else {}),
            local_rope=local_rope,
        )

    def for_context(self, tokens: int) -> ModelConfig:
        """The configuration of a worker whose sequences have up to `tokens` tokens."""
        return dataclasses.replace(self, rope=self.rope.for_context(tokens))

    @property
    def attention_scale(self) -> float:
        return float((self.query_scalar or self.head_dim) ** -0.5)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotary embeddings; that of layers with a window is the second, where it differs."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def rope_of(self, layer: int) -> int:
        """Which of `ropes` a layer uses."""
        return int(self.local_rope is not None and self.layer_windows[layer] is not None)

    def layout(self, block_tokens: int, dtype_name: str, rank: int = 0, rank_count: int = 1) -> Layout:
        """One cache group for each distinct window, with planes "k" and "v" of this rank's heads.

        Raises ValueError when the KV heads do not divide evenly among the ranks.
        """
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be positive, got {block_tokens}")
        if self.num_kv_heads % rank_count:
            raise ValueError(f"{self.num_kv_heads} KV heads do not divide among {rank_count} ranks")
        heads = self.num_kv_heads // rank_count
        planes = tuple(Plane(name, dtype_name, heads, self.head_dim) for name in ("k", "v"))
        layers_of: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.layer_windows):
            layers_of.setdefault(window, []).append(layer)
        groups = tuple(
            CacheGroup(tuple(layers), planes, block_tokens, window) for window, layers in layers_of.items()
        )
        return Layout(groups, rank, rank_count)

    def digest(self) -> bytes:
        """SHA-256 of the fields: equal exactly where two configurations compute the same function."""
        values = dataclasses.asdict(self)
        for field in dataclasses.fields(self):
            if values[field.name] == field.default:
                del values[field.name]
        for rope in (values["rope"], values.get("local_rope", {})):
            for name in [name for name, default in LATER_FIELDS.items() if rope.get(name) == default]:
                del rope[name]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()


def _family(file: ConfigFile) -> str:
    names = file.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise file.error("architectures", f"expected one of {', '.join(FAMILIES)}")
    if names[0] not in FAMILIES:
        raise file.error("architectures", f"{names[0]} is not supported (supported: {', '.join(FAMILIES)})")
    return FAMILIES[names[0]]


def _gemma_fields(file: ConfigFile) -> dict[str, Any]:
    return {
        "query_scalar": file.positive_number("query_pre_attn_scalar", _GEMMA_QUERY_SCALAR),
        "embedding_scale": file.positive("hidden_size") ** 0.5,
        "post_norms": True,
        "norm_offset": True,
    }


def _ropes(
    file: ConfigFile, family: str, max_positions: int, head_dim: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding, and that of layers with a window where it differs."""
    if family == "gemma3":
        return read_rope_by_layer_type(file, max_positions)
    if family == "phi3":
        return read_partial_rope(file, max_positions, head_dim), None
    return read_rope(file, max_positions), None


def _activation(file: ConfigFile, family: str) -> str:
    expected = _ACTIVATIONS.get(family, "silu")
    key = "hidden_activation" if family == "gemma3" else "hidden_act"
    found = file.text(key, expected)
    if found != expected:
        raise file.error(key, f"only {expected} is supported, got {found!r}")
    if family == "gemma3":
        for key in ("final_logit_softcapping", "attn_logit_softcapping"):
            if file.get(key) is not None:
                raise file.error(key, "capping logits is not supported")
        if file.flag("use_bidirectional_attention", False):
            raise file.error("use_bidirectional_attention", "only causal attention is supported")
    return found


def _head_dim(file: ConfigFile, family: str, heads: int) -> int:
    hidden = file.positive("hidden_size")
    if file.get("head_dim") is not None:
        head_dim = file.positive("head_dim")
    elif family in _HEAD_DIMS:
        head_dim = _HEAD_DIMS[family]
    elif hidden % heads:
        raise file.error("hidden_size", f"{hidden} is not a multiple of the {heads} attention heads")
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise file.error("head_dim", f"rotary embedding needs an even size, got {head_dim}")
    return head_dim


def _layer_windows(file: ConfigFile, family: str, layers: int) -> tuple[int | None, ...]:
    if family == "llama":
        return (None,) * layers
    if family in ("mistral", "phi3"):
        if not file.has("sliding_window"):
            return (_MISTRAL_WINDOW if family == "mistral" else None,) * layers
        window = None if file.get("sliding_window") is None else file.positive("sliding_window")
        return (window,) * layers
    if family == "gemma3":
        window = file.positive("sliding_window", _MISTRAL_WINDOW)
        return tuple(window if sliding else None for sliding in _sliding_layers(file, layers, family))
    if not file.flag("use_sliding_window", False) or (
        file.has("sliding_window") and file.get("sliding_window") is None
    ):
        return (None,) * layers
    window = file.positive("sliding_window", _MISTRAL_WINDOW)
    return tuple(window if sliding else None for sliding in _sliding_layers(file, layers, family))


def _sliding_layers(file: ConfigFile, layers: int, family: str) -> list[bool]:
    """Which layers have a window: by `layer_types` where the file has it; else in Gemma all but every sixth
    or so, in other families all from `max_window_layers` on."""
    types = file.get("layer_types")
    if types is None and family == "gemma3":
        pattern = file.positive("sliding_window_pattern", _GEMMA_PATTERN)
        return [(layer + 1) % pattern != 0 for layer in range(layers)]
    if types is None:
        first = file.count("max_window_layers", _FIRST_WINDOW_LAYER)
        return [layer >= first for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise file.error("layer_types", f"expected a list of {layers} names")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise file.error("layer_types", f"{name!r} is not supported")
    return [name == "sliding_attention" for name in types]


def _dtype_name(file: ConfigFile) -> str:
    key = "dtype" if file.get("dtype") is not None else "torch_dtype"
    name = file.text(key, "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise file.error(key, f"{name!r} is not one of {', '.join(DTYPE_BYTES)}")
    return name
