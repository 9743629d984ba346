from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from baton.engine.kernels.reference.row_ops import apply_rope
from baton.engine.model.families.registry import load_config
from baton.engine.model.rope import RopeTable
from tests.support.checkpoints import LONGROPE

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "original_max_position_embeddings": 512, **LLAMA3},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False},
]


@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_tables_equal_transformers_bitwise(parameters: dict[str, Any], head_dim: int, tmp_path: Path) -> None:
    theirs = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 5e5, **parameters},
        architectures=["LlamaForCausalLM"],
    )
    theirs.save_pretrained(tmp_path)
    positions = torch.cat((torch.arange(300), torch.tensor([1000, 2047, 100_000])))
    expected = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    table = RopeTable(load_config(tmp_path).rope, head_dim, torch.device("cpu"))
    for ours, reference in zip(table.cos_sin(positions), expected, strict=True):
        assert torch.equal(torch.cat((ours, ours), dim=-1), reference[0])


@pytest.mark.parametrize("tokens", [300, 1024, 1025, 2000])
def test_longrope_takes_its_factors_by_the_context(tokens: int, tmp_path: Path) -> None:
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, **LONGROPE}
    theirs = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=2048,
        original_max_position_embeddings=1024,
        rope_parameters={**parameters, "original_max_position_embeddings": 1024},
        architectures=["Phi3ForCausalLM"],
    )
    theirs.save_pretrained(tmp_path)
    positions = torch.arange(tokens)
    expected = Phi3RotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    table = RopeTable(load_config(tmp_path).for_context(tokens).rope, 16, torch.device("cpu"))
    cos, sin = table.cos_sin(positions)
    for ours, reference in zip((cos, sin), expected, strict=True):
        assert torch.equal(torch.cat((ours[:, :6], ours[:, :6]), dim=-1), reference[0])
    assert bool((cos[:, 6:] == 1).all())
    assert not sin[:, 6:].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotation_is_multiplication_of_complex_numbers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 3, 10, generator=generator).to(dtype)
    angles = torch.randn(11, 5, generator=generator)
    a, b = x.double().chunk(2, dim=-1)
    turned = torch.complex(a, b) * torch.polar(torch.ones(11, 1, 5).double(), angles.double()[:, None])
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(
        apply_rope(x, angles.cos(), angles.sin()).double(), expected, atol=tolerance, rtol=tolerance
    )
