from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from baton.base.errors import BatonError, ErrorKind
from baton.engine.model.families.registry import load_config
from baton.engine.model.tensors import active_weights, tensor_specs
from baton.engine.model.weights import weight_bytes
from tests.engine.model.families.test_config import load
from tests.support.checkpoints import MIXTURES, Case
from tests.support.reference import load_reference

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}


@pytest.mark.parametrize("case", MIXTURES, ids=str)
def test_experts_are_those_that_transformers_writes(case: Case, tmp_path: Path) -> None:
    case.make(tmp_path)
    config, theirs = load_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    experts = config.experts
    assert experts is not None
    assert (experts.count, experts.top_k) == (theirs.num_experts, theirs.num_experts_per_tok)
    inner = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert (experts.intermediate_size, experts.normalise) == (inner, getattr(theirs, "norm_topk_prob", True))
    sparse = [config.experts_of(layer) is not None for layer in range(config.num_layers)]
    assert sparse == [hasattr(layer.mlp, "experts") for layer in load_reference(tmp_path).model.layers]


@pytest.mark.parametrize(
    ("base", "changes", "line"),
    [
        (QWEN3_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than num_experts 8"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than num_local_experts 8"),
        (QWEN3_MOE, {"num_experts": 0}, "num_experts: must not be 0"),
        (QWEN3_MOE, {"moe_intermediate_size": "wide"}, "moe_intermediate_size: expected a whole number"),
        (QWEN3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob: expected true or false, got 1"),
        (QWEN3_MOE, {"scoring_func": "sigmoid"}, "scoring_func: only softmax is supported, got 'sigmoid'"),
        (QWEN3_MOE, {"routed_scaling_factor": 2.5}, "routed_scaling_factor: only 1.0 is supported, got 2.5"),
        (QWEN3_MOE, {"n_group": 4}, "n_group: only 1 is supported, got 4"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 96}, "only 0 is supported, got 96"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise: only 0.0 is supported, got 0.1"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step: must not be 0"),
        (QWEN3_MOE, {"mlp_only_layers": [4]}, "mlp_only_layers: expected numbers of layers below 4, got [4]"),
        (QWEN3_MOE, {"mlp_only_layers": [0, 1, 2, 3]}, "mlp_only_layers: no layer has experts"),
        (
            {},
            {"architectures": ["Qwen2MoeForCausalLM"]},
            "architectures: Qwen2MoeForCausalLM is not supported",
        ),
    ],
)
def test_what_a_mixture_may_not_have(
    base: dict[str, Any], changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(BatonError, match=re.escape(line)) as caught:
        load(tmp_path, **{**base, **changes})
    assert caught.value.kind is ErrorKind.INVALID
    assert "\n" not in caught.value.message


def test_the_digest_of_a_mixture_differs_by_its_experts(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"num_experts_per_tok": 3},
        {"norm_topk_prob": True},
        {"mlp_only_layers": [1]},
        {"num_experts": 9},
    ]
    digests = {load(tmp_path, **{**QWEN3_MOE, **change}).digest() for change in changes}
    assert len(digests) == len(changes)


# The keys of two published config.json that say what the model is.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Mixtral-8x7B": {
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
}


@pytest.mark.parametrize(
    ("name", "tensors", "total", "active"),
    [
        ("Qwen3-30B-A3B", 18_432, 30_532_122_624, 3_353_032_704),
        ("Mixtral-8x7B", 768, 46_702_792_704, 12_879_925_248),
    ],
)
def test_published_models_have_the_weights_that_they_are_known_for(
    name: str, tensors: int, total: int, active: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = load_config(tmp_path)
    assert sum(spec.expert is not None for spec in tensor_specs(config)) == tensors
    assert weight_bytes(config, torch.bfloat16) == 2 * total
    vocabulary = 2 * config.vocab_size * config.hidden_size
    norms = total - sum(math.prod(spec.shape) for spec in tensor_specs(config) if len(spec.shape) == 2)
    assert active_weights(config) + vocabulary + norms == active
