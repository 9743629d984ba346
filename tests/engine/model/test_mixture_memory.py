"""GPU memory that a mixture of experts takes while it is loaded: its weights, and a batch of tensors that are
converted."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.families.registry import load_config
from baton.engine.model.weight_formats import weight_formats
from baton.engine.model.weights import load_weights, random_weights, weight_bytes
from bench.shapes import SHAPES
from tests.engine.dense_weights import tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Converted at once at most: a gibibyte of tensors, each in float32 a few times; and what is read ahead.
CONVERTED = 5 << 28
LAYERS = {"num_hidden_layers": 2}
SMALL = {**LAYERS, "hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 16, "vocab_size": 512}


def written(folder: Path, changes: dict[str, int]) -> ModelConfig:
    """Writes random weights of Qwen3-30B-A3B's shape with `changes`, in bfloat16."""
    (folder / "config.json").write_text(json.dumps({**SHAPES["qwen3-30b-a3b"].config, **changes}))
    config = load_config(folder)
    drawn = tensors(random_weights(config, 1, DEVICE, torch.bfloat16))
    save_file({name: tensor.cpu().clone() for name, tensor in drawn.items()}, folder / "model.safetensors")
    return config


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_weights_take_what_their_shapes_say(quantization: str | None, tmp_path: Path) -> None:
    config = written(tmp_path, SMALL)
    formats = weight_formats(config, quantization)
    weights = load_weights(config, tmp_path, DEVICE, torch.bfloat16, formats=formats)
    wanted = weight_bytes(config, torch.bfloat16, formats)
    assert sum(weight.nbytes for weight in weights.values()) == wanted


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_loading_takes_little_more_than_the_weights(quantization: str | None, tmp_path: Path) -> None:
    """Two layers with all 128 experts, which in bf16 take 3.7 GB."""
    config = written(tmp_path, LAYERS)
    formats = weight_formats(config, quantization)
    wanted = weight_bytes(config, torch.bfloat16, formats)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = load_weights(config, tmp_path, DEVICE, torch.bfloat16, formats=formats)
    held, most = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    label = f"{quantization or 'bfloat16'}: {len(weights)} tensors, {held / 1e9:.2f} GB"
    print(f"\nPROOF loading in {label}, {most / 1e9:.2f} at most")
    assert held == pytest.approx(wanted, rel=0.01)
    assert most <= wanted + CONVERTED
