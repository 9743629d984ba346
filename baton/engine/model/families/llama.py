"""Llama, and families that differ from it in biases, windows and norms of heads: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.config.rope_config import read_rope
from baton.engine.model.families.decoder import (
    read_decoder,
    read_head_dim,
    read_layer_windows,
    read_window,
)
from baton.model_spec.model_files import ConfigFile

_MISTRAL_WINDOW = 4096
_QWEN_FIRST_WINDOW_LAYER = 28
_QWEN3_HEAD_DIM = 128


def llama(file: ConfigFile) -> ModelConfig:
    config = read_decoder(file, "llama", rope=read_rope(file), head_dim=read_head_dim(file))
    bias = file.flag("attention_bias", False)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=file.flag("mlp_bias", False))


def mistral(file: ConfigFile) -> ModelConfig:
    config = read_decoder(file, "mistral", rope=read_rope(file), head_dim=read_head_dim(file))
    return replace(config, layer_windows=(read_window(file, _MISTRAL_WINDOW),) * config.num_layers)


def qwen2(file: ConfigFile) -> ModelConfig:
    config = read_decoder(file, "qwen2", rope=read_rope(file), head_dim=read_head_dim(file))
    return replace(config, layer_windows=_qwen_windows(file, config.num_layers), qkv_bias=True)


def qwen3(file: ConfigFile) -> ModelConfig:
    head_dim = read_head_dim(file, _QWEN3_HEAD_DIM)
    config = read_decoder(file, "qwen3", rope=read_rope(file), head_dim=head_dim)
    windows, bias = _qwen_windows(file, config.num_layers), file.flag("attention_bias", False)
    return replace(config, layer_windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True)


def _qwen_windows(file: ConfigFile, layers: int) -> tuple[int | None, ...]:
    """Only where they are switched on: from `max_window_layers` on, unless the file names the layers."""
    has_null = file.has("sliding_window") and file.get("sliding_window") is None
    if not file.flag("use_sliding_window", False) or has_null:
        return (None,) * layers
    first = file.count("max_window_layers", _QWEN_FIRST_WINDOW_LAYER)
    return read_layer_windows(file, [layer >= first for layer in range(layers)])
