"""Shapes of mixtures: bytes in memory are the engine's, those of a step are of the experts that it takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from baton.engine.model.families.registry import load_config
from baton.engine.model.tensors import active_weights, tensor_specs
from baton.engine.model.weight_formats import weight_formats
from baton.engine.model.weights import weight_bytes
from bench.case import DecodeCase
from bench.shapes import SHAPES, Precision

MIXTURES = ["qwen3-30b-a3b", "mixtral-8x7b"]


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("name", ["qwen3-8b", *MIXTURES])
def test_bytes_held_are_the_engines(name: str, quantization: str | None, tmp_path: Path) -> None:
    shape = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(shape.config))
    config = load_config(tmp_path)
    whole = weight_bytes(config, torch.bfloat16, weight_formats(config, quantization))
    norms = sum(2 * math.prod(spec.shape) for spec in tensor_specs(config) if len(spec.shape) == 1)
    assert shape.held_bytes(Precision("bf16", quantization)) == whole - norms
    head = config.vocab_size * config.hidden_size
    assert shape.weight_elements() == active_weights(config) + head


def test_a_step_reads_the_experts_that_its_rows_draw() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    assert shape.experts_read(1) == 8
    assert shape.experts_read(2) == pytest.approx(8 + 8 * (1 - 8 / 128))
    assert shape.experts_read(math.inf) == 128
    assert SHAPES["qwen3-8b"].experts_read(1) == 1
    precision = Precision("bf16")
    assert shape.weight_bytes(precision, 1) == 2 * shape.weight_elements()
    cases = [
        DecodeCase("qwen3-30b-a3b", precision, batch, 1024, "greedy", "fast") for batch in (1, 8, 32, 64, 128)
    ]
    # At 4.2 TB/s.
    floors = [case.floor_ms(1024, 4.2e12) for case in cases]
    assert floors == pytest.approx([1.47, 6.34, 13.4, 15.7, 17.5], rel=0.01)
