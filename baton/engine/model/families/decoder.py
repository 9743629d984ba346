"""Functions that the families' readers of `config.json` share.

Keys of old and new transformers releases are both understood; whatever would silently change the answers is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.config.rope_config import RopeConfig
from baton.engine.model.quantization.read import read_scheme
from baton.model_spec.layout import DTYPE_BYTES
from baton.model_spec.model_files import ConfigFile, ModelLimits

_DEFAULT_WINDOW = 4096


def read_decoder(
    file: ConfigFile,
    family: str,
    *,
    rope: RopeConfig,
    head_dim: int,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    tied_head: bool = False,
) -> ModelConfig:
    """A decoder without biases, windows and norms of heads, for its family to replace what it has.

    `activation`: the key that names it, and the only one that the family has; `tied_head`: the default.
    """
    key, expected = activation
    if (found := file.text(key, expected)) != expected:
        raise file.error(key, f"only {expected} is supported, got {found!r}")
    heads = file.positive("num_attention_heads")
    kv_heads = file.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise file.error("num_key_value_heads", f"{kv_heads} does not divide the {heads} attention heads")
    layers, limits = file.positive("num_hidden_layers"), ModelLimits.read(file)
    return ModelConfig(
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
        layer_windows=(None,) * layers,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_head=file.flag("tie_word_embeddings", tied_head),
        eos_token_ids=limits.eos_token_ids,
        dtype=_dtype_name(file),
        activation=expected,
        quantization=read_scheme(file),
    )


def read_head_dim(file: ConfigFile, default: int | None = None) -> int:
    """The size of a head. `default` None: the hidden size divided among the heads."""
    hidden, heads = file.positive("hidden_size"), file.positive("num_attention_heads")
    if default is None and file.get("head_dim") is None and hidden % heads:
        raise file.error("hidden_size", f"{hidden} is not a multiple of the {heads} attention heads")
    head_dim = file.positive("head_dim", default or hidden // heads)
    if head_dim % 2:
        raise file.error("head_dim", f"rotary embedding needs an even size, got {head_dim}")
    return head_dim


def read_window(file: ConfigFile, default: int | None) -> int | None:
    """Reads `sliding_window` of all layers; None: no window. `default`: where the file does not have the
    key."""
    if not file.has("sliding_window"):
        return default
    return None if file.get("sliding_window") is None else file.positive("sliding_window")


def read_layer_windows(file: ConfigFile, windowed: Sequence[bool]) -> tuple[int | None, ...]:
    """Reads `sliding_window` of the layers that have one by `layer_types`; `windowed`: where the file does
    not have that key."""
    window = file.positive("sliding_window", _DEFAULT_WINDOW)
    types = file.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != len(windowed):
            raise file.error("layer_types", f"expected a list of {len(windowed)} names")
        for name in types:
            if name not in ("full_attention", "sliding_attention"):
                raise file.error("layer_types", f"{name!r} is not supported")
        windowed = [name == "sliding_attention" for name in types]
    return tuple(window if there else None for there in windowed)


def _dtype_name(file: ConfigFile) -> str:
    key = "dtype" if file.get("dtype") is not None else "torch_dtype"
    name = file.text(key, "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise file.error(key, f"{name!r} is not one of {', '.join(DTYPE_BYTES)}")
    return name
