"""The decode pass by GPU kernels against the plain-torch model: every family's features, tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.decode.gpu_pass import DecodePass, PassOptions, buckets_up_to
from baton.engine.forward.gemm_table import ProductTable
from baton.engine.kernels.gpu.attention.items import SplitPolicy
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.families.registry import load_config
from baton.engine.model.modules import Model, Precision
from baton.engine.model.reference import ReferenceModel, Rows
from baton.engine.model.weights import random_weights
from tests.engine.local_engine import CONFIG
from tests.engine.split_reference import fill_items, split_items

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "windows": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 20,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 10,
        "query_pre_attn_scalar": 30,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "partial_rotary_factor": 0.5,
    },
}


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_plain_decoders(tmp_path: Path, family: str, exact: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **FAMILIES[family]}))
    config = load_config(tmp_path)
    layout = config.layout(4, "float32")
    model = Model(
        config, random_weights(config, 3, DEVICE, torch.float32), layout, DEVICE, Precision.of(torch.float32)
    )
    positions = [37] if family == "llama" and not exact else [37, 3, 70]
    table = 1 + torch.randperm(3 * 20, generator=torch.Generator().manual_seed(1)).view(3, 20).to(DEVICE)
    caches = [KVCache(layout, 61, DEVICE) for _ in range(2)]
    for group, other in zip(caches[0].groups, caches[1].groups, strict=True):
        group.copy_(torch.randn(group.shape, generator=torch.Generator().manual_seed(2)))
        other.copy_(group)
    count = len(positions)
    rows = Rows(
        token_ids=torch.arange(5, 5 + count, device=DEVICE),
        positions=torch.tensor(positions, device=DEVICE),
        query_start=list(range(count + 1)),
        block_tables=tuple(table[:count] for _ in layout.groups),
    )
    reference = ReferenceModel(model)
    expected = reference.logits(reference.forward(rows, caches[0]))

    policy = SplitPolicy(fixed=64) if exact else SplitPolicy(wanted=4, shortest=64)
    options = PassOptions(ProductTable([], exact=exact), policy)
    tables = tuple(table.int() for _ in layout.groups)
    step = DecodePass(model, caches[1], tables, count, options)
    step.inputs.slot.copy_(torch.arange(count))
    step.inputs.token.copy_(rows.token_ids)
    step.inputs.position.copy_(rows.positions)
    for items, cache_group in zip(step.inputs.items, layout.groups, strict=True):
        fill_items(
            items, split_items(positions, cache_group.window, policy), step.inputs.slot, rows.positions
        )
    torch.testing.assert_close(step.run(count), expected, rtol=1e-3, atol=1e-3)
    for mine, plain in zip(caches[1].groups, caches[0].groups, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-3)


def test_buckets() -> None:
    assert buckets_up_to(1) == [1]
    assert buckets_up_to(5) == [1, 2, 4, 5]
    assert buckets_up_to(256)[-3:] == [128, 192, 256]
    assert buckets_up_to(600)[-3:] == [256, 512, 600]
