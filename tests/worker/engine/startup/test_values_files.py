"""The models for which the chart has values files fit into their GPUs, by the worker's own memory plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from baton.base.errors import BatonError
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.families.registry import load_config
from baton.engine.model.weight_formats import weight_formats
from baton.engine.model.weights import weight_bytes
from baton.engine.shared_memory.step_shape import StepShape
from baton.model_spec.layout import FP8
from baton.model_spec.split import splits
from services.common.config.worker import EngineConfig
from services.worker.engine.startup.memory_plan import Gpu, MemoryPlanner, other_bytes, plan_devices
from tests.worker.engine.startup.test_memory_plan import LLAMA_8B

CHART = Path(__file__).parents[4] / "deploy" / "helm" / "baton"
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
H200 = Gpu("GPU 0", 141_000_000_000, 140_000_000_000)
_CONTEXT = 131_072


TWIN = CHART / "values-h200-70b-bf16.yaml"


@pytest.fixture
def values() -> Any:
    return yaml.safe_load((CHART / "values-h200-70b.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return load_config(tmp_path)


def test_a_70b_model_in_fp8_fits_into_an_h200(values: Any, config: ModelConfig) -> None:
    engine = EngineConfig.model_validate(values["engine"])
    assert (engine.quantization, engine.kv_dtype) == ("fp8", "fp8")
    weights = weight_bytes(config, torch.bfloat16, weight_formats(config, engine.quantization))
    assert weights == pytest.approx(72.7e9, rel=0.005)
    layout = config.layout(engine.block_tokens_on("cuda"), FP8)
    block = sum(group.block_bytes for group in layout.groups)
    assert block == engine.block_tokens_on("cuda") * values["model"]["kvBytesPerToken"]

    plan = MemoryPlanner(config, engine, layout, _CONTEXT, weights, H200).plan()

    share = 0.92 * H200.total_bytes
    taken = weights + plan.kv_blocks * block + other_bytes(config, engine, StepShape(plan.slots))
    assert share - block < taken <= share
    assert plan.slots == 256
    assert 300_000 < plan.kv_blocks * engine.block_tokens_on("cuda") < 350_000


def test_in_16_bits_it_fits_into_two(config: ModelConfig) -> None:
    """The number of tokens is that of the file's comment, rounded down to thousands."""
    text = TWIN.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    engine = EngineConfig.model_validate(values["engine"])
    planners = []
    for split in splits(engine.tensor_parallel):
        part = config.of_rank(split)
        layout = part.layout(engine.block_tokens_on("cuda"), "bfloat16")
        weights = weight_bytes(part, torch.bfloat16)
        planners.append(MemoryPlanner(part, engine, layout, _CONTEXT, weights, H200))
    plan = plan_devices(planners)
    blocks = config.layout(engine.block_tokens_on("cuda"), "bfloat16").groups
    each = sum(group.block_bytes for group in blocks)
    assert each == engine.block_tokens_on("cuda") * values["model"]["kvBytesPerToken"]
    assert plan.slots == 256
    thousands = plan.kv_blocks * engine.block_tokens_on("cuda") // 1000
    assert f" {thousands},000 tokens of KV" in text.replace("\n# ", " ")


def test_in_16_bits_it_does_not(values: Any, config: ModelConfig) -> None:
    engine = EngineConfig.model_validate({**values["engine"], "quantization": None})
    layout = config.layout(engine.block_tokens_on("cuda"), FP8)
    weights = weight_bytes(config, torch.bfloat16)
    with pytest.raises(BatonError, match="the model does not fit"):
        MemoryPlanner(config, engine, layout, _CONTEXT, weights, H200).plan()
