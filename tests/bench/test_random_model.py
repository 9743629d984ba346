"""A mixture of random weights must route about evenly, or what is measured with it is too good."""

from __future__ import annotations

import pytest
import torch

from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.layers.experts import ExpertsMlp
from baton.engine.model.reference import ReferenceModel, Rows
from bench.engine_driver import random_model
from bench.shapes import SHAPES, Precision, Shape

SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "moe_intermediate_size": 32, "num_attention_heads": 4}
MIXTURE = Shape({**SHAPES["qwen3-30b-a3b"].config, **SMALL, "num_key_value_heads": 2, "vocab_size": 320})
ROWS = 256


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_experts_are_taken_about_equally(quantization: str | None) -> None:
    torch.manual_seed(1)
    model = random_model(MIXTURE, Precision("float32", quantization), ROWS, 16, "cpu")
    blocks = ROWS // 16
    rows = Rows(
        token_ids=torch.randint(320, (ROWS,)),
        positions=torch.arange(ROWS),
        query_start=[0, ROWS],
        block_tables=(torch.arange(1, blocks + 1)[None],),
    )
    ReferenceModel(model).forward(rows, KVCache(model.layout, blocks + 1, "cpu"))
    taken = [layer.mlp.taken.double() for layer in model.layers if isinstance(layer.mlp, ExpertsMlp)]
    assert [int(each.sum()) for each in taken] == [8 * ROWS] * 2
    assert max(float(each.max() / each.mean()) for each in taken) < 2.5
