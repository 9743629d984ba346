"""Gemma 3, text models: norms before and after attention and MLP, GeGLU, scaled embeddings, and layers with
and without a window, each kind with a rotary embedding of its own."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.model.config.model_config import LayerNorms, ModelConfig
from baton.engine.model.config.rope_config import RopeConfig, rope_of_section
from baton.engine.model.families.decoder import read_decoder, read_head_dim, read_layer_windows
from baton.model_spec.model_files import ConfigFile

_HEAD_DIM = 256
_QUERY_SCALAR = 256.0
# One layer in this many sees all tokens.
_PATTERN = 6
_NORMS = LayerNorms(
    attention="input_layernorm",
    post_attention="post_attention_layernorm",
    mlp="pre_feedforward_layernorm",
    post_mlp="post_feedforward_layernorm",
)


def gemma3(file: ConfigFile) -> ModelConfig:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if file.get(key) is not None:
            raise file.error(key, "capping logits is not supported")
    if file.flag("use_bidirectional_attention", False):
        raise file.error("use_bidirectional_attention", "only causal attention is supported")
    rope, window_rope = _ropes(file)
    config = read_decoder(
        file,
        "gemma3",
        rope=rope,
        head_dim=read_head_dim(file, _HEAD_DIM),
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        tied_head=True,
    )
    bias = file.flag("attention_bias", False)
    pattern = file.positive("sliding_window_pattern", _PATTERN)
    windowed = [(layer + 1) % pattern != 0 for layer in range(config.num_layers)]
    return replace(
        config,
        layer_windows=read_layer_windows(file, windowed),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        query_scalar=file.positive_number("query_pre_attn_scalar", _QUERY_SCALAR),
        window_rope=window_rope,
        embedding_scale=config.hidden_size**0.5,
        layer_norms=_NORMS,
        norm_offset=True,
    )


def _ropes(file: ConfigFile) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of layers that see all tokens, and of those with a window."""
    nothing = ConfigFile(file.path, {})
    by_type = file.section("rope_parameters") or nothing
    full = file.section("rope_scaling") or by_type.section("full_attention") or nothing
    windowed = by_type.section("sliding_attention") or nothing
    return (
        rope_of_section(file, full, file.positive_number("rope_theta", 1_000_000.0)),
        rope_of_section(file, windowed, file.positive_number("rope_local_base_freq", 10_000.0)),
    )
