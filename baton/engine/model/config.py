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

from baton.engine.model.rope_config import RopeConfig, read_rope
from baton.layout import DTYPE_BYTES, CacheGroup, Layout, Plane
from baton.model_files import ConfigFile, ModelLimits

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_QWEN3_HEAD_DIM = 128
_MISTRAL_WINDOW = 4096
_FIRST_WINDOW_LAYER = 28


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

    @classmethod
    def load(cls, folder: str | Path) -> ModelConfig:
        """Reads `config.json` and, for the end-of-sequence ids, `generation_config.json` if there is one.

        Raises BatonError(INVALID) with one line that names file and key.
        """
        file = ConfigFile.read(Path(folder) / "config.json")
        family = _family(file)
        if file.get("quantization_config") is not None:
            raise file.error("quantization_config", "quantised checkpoints are not supported")
        activation = file.text("hidden_act", "silu")
        if activation != "silu":
            raise file.error("hidden_act", f"only silu is supported, got {activation!r}")
        heads = file.positive("num_attention_heads")
        kv_heads = file.positive("num_key_value_heads", heads)
        if heads % kv_heads:
            raise file.error("num_key_value_heads", f"{kv_heads} does not divide the {heads} attention heads")
        head_dim = _head_dim(file, family, heads)
        layers = file.positive("num_hidden_layers")
        limits = ModelLimits.read(file)
        attention_bias = family in ("llama", "qwen3") and file.flag("attention_bias", False)
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
            rope=read_rope(file, limits.max_positions),
            layer_windows=_layer_windows(file, family, layers),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family == "llama" and file.flag("mlp_bias", False),
            qk_norm=family == "qwen3",
            tied_head=file.flag("tie_word_embeddings", False),
            eos_token_ids=limits.eos_token_ids,
            dtype=_dtype_name(file),
        )

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

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
        """SHA-256 of every field: equal exactly where two configurations compute the same function."""
        fields = json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(fields.encode()).digest()


def _family(file: ConfigFile) -> str:
    names = file.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise file.error("architectures", f"expected one of {', '.join(FAMILIES)}")
    if names[0] not in FAMILIES:
        raise file.error("architectures", f"{names[0]} is not supported (supported: {', '.join(FAMILIES)})")
    return FAMILIES[names[0]]


def _head_dim(file: ConfigFile, family: str, heads: int) -> int:
    hidden = file.positive("hidden_size")
    if file.get("head_dim") is not None:
        head_dim = file.positive("head_dim")
    elif family == "qwen3":
        head_dim = _QWEN3_HEAD_DIM
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
    if family == "mistral":
        if not file.has("sliding_window"):
            return (_MISTRAL_WINDOW,) * layers
        window = None if file.get("sliding_window") is None else file.positive("sliding_window")
        return (window,) * layers
    if not file.flag("use_sliding_window", False) or (
        file.has("sliding_window") and file.get("sliding_window") is None
    ):
        return (None,) * layers
    window = file.positive("sliding_window", _MISTRAL_WINDOW)
    return tuple(window if sliding else None for sliding in _sliding_layers(file, layers))


def _sliding_layers(file: ConfigFile, layers: int) -> list[bool]:
    """Which layers slide: by `layer_types` where the file has it, else all from `max_window_layers` on."""
    types = file.get("layer_types")
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
