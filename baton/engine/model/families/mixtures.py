"""Mixtures of experts: Qwen3-MoE, which is Qwen3 except for its MLPs and windows, and Mixtral, which is
Mistral except for its MLPs."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.model.config.experts_config import ExpertNames, ExpertsConfig
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.config.rope_config import read_rope
from baton.engine.model.families.decoder import read_decoder, read_head_dim, read_window
from baton.model_spec.model_files import ConfigFile

_QWEN_EXPERTS, _QWEN_TOP_K, _QWEN_INNER, _QWEN_WINDOW = 128, 8, 768, 4096
_MIXTRAL_EXPERTS, _MIXTRAL_TOP_K = 8, 2
_MIXTRAL_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
# What models have by other keys than these families', with the value by which they do not.
_NOT_SUPPORTED = {
    "shared_expert_intermediate_size": 0,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "router_jitter_noise": 0.0,
}


def qwen3_moe(file: ConfigFile) -> ModelConfig:
    config = read_decoder(file, "qwen3_moe", rope=read_rope(file), head_dim=read_head_dim(file))
    window = read_window(file, _QWEN_WINDOW) if file.flag("use_sliding_window", False) else None
    bias = file.flag("attention_bias", False)
    experts = _read_experts(file, _QWEN_EXPERTS, _QWEN_TOP_K)
    experts = replace(
        experts,
        intermediate_size=file.positive("moe_intermediate_size", _QWEN_INNER),
        normalise=file.flag("norm_topk_prob", False),
        dense_layers=_dense_layers(file, config.num_layers),
    )
    if len(experts.dense_layers) == config.num_layers:
        raise file.error("mlp_only_layers", "no layer has experts")
    return replace(
        config,
        layer_windows=(window,) * config.num_layers,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        experts=experts,
    )


def mixtral(file: ConfigFile) -> ModelConfig:
    config = read_decoder(file, "mixtral", rope=read_rope(file), head_dim=read_head_dim(file))
    experts = replace(_read_experts(file, _MIXTRAL_EXPERTS, _MIXTRAL_TOP_K), names=_MIXTRAL_NAMES)
    windows = (read_window(file, None),) * config.num_layers
    return replace(config, layer_windows=windows, experts=experts)


def _read_experts(file: ConfigFile, count: int, top_k: int) -> ExpertsConfig:
    """Experts of the model's intermediate size, in all layers, with normalised weights. `count`, `top_k`: the
    family's defaults."""
    for key, absent in _NOT_SUPPORTED.items():
        if file.get(key) is not None and file.number(key) != absent:
            raise file.error(key, f"only {absent} is supported, got {file.get(key)}")
    if (scoring := file.text("scoring_func", "softmax")) != "softmax":
        raise file.error("scoring_func", f"only softmax is supported, got {scoring!r}")
    key = "num_experts" if file.get("num_experts") is not None else "num_local_experts"
    count, top_k = file.positive(key, count), file.positive("num_experts_per_tok", top_k)
    if top_k > count:
        raise file.error("num_experts_per_tok", f"{top_k} is more than {key} {count}")
    return ExpertsConfig(count, top_k, file.positive("intermediate_size"), normalise=True)


def _dense_layers(file: ConfigFile, layers: int) -> tuple[int, ...]:
    """The layers of `mlp_only_layers`, and those between every `decoder_sparse_step` layers."""
    listed, step = file.get("mlp_only_layers"), file.positive("decoder_sparse_step", 1)
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or any(
        not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < layers for one in listed
    ):
        raise file.error("mlp_only_layers", f"expected numbers of layers below {layers}, got {listed!r}")
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
