"""The decode pass by GPU kernels against the plain-torch model: every family's features, tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.decode.gpu_pass import DecodePass, PassOptions
from baton.engine.gemm_dispatch.table import ProductTable
from baton.engine.kernels.gpu.attention.items import SplitPolicy
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.families.registry import load_config
from baton.engine.model.modules import Model, Precision
from baton.engine.model.reference import ReferenceModel, Rows
from baton.engine.model.weight_formats import weight_formats
from baton.engine.model.weights import random_weights
from baton.engine.plan.decode_rows import batches_up_to
from bench.engine_driver import randomize
from tests.engine.local_engine import CONFIG
from tests.engine.split_reference import fill_items, split_items
from tests.support.fewer import each_value_once

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
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}


@pytest.mark.parametrize(
    ("model", "exact"),
    each_value_once(
        [*((family, None) for family in FAMILIES), ("llama with biases", "fp8"), ("llama", "int4")],
        [False, True],
    ),
    ids=str,
)
def test_logits_are_the_plain_decoders(tmp_path: Path, model: tuple[str, str | None], exact: bool) -> None:
    family, quantization = model
    mine, expected, caches = one_step(tmp_path, family, exact=exact, quantization=quantization)
    torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)
    for ours, plain in zip(caches[1].groups, caches[0].groups, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("llama with biases", "fp8"), pytest.param("llama", "int4", marks=pytest.mark.slow)],
)
def test_a_quantised_head(tmp_path: Path, family: str, quantization: str) -> None:
    """Tied to the embedding, and not."""
    mine, expected, _ = one_step(tmp_path, family, exact=False, quantization=quantization, head=True)
    torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)
    plain, *_ = one_step(tmp_path, family, exact=False, quantization=quantization)
    assert float((mine - plain).abs().max()) > 0.01


@pytest.mark.parametrize("family", ["llama", "windows"])
def test_a_cache_of_codes(tmp_path: Path, family: str) -> None:
    """The last bit of a sum may decide to which side an element of a new key is rounded: in few of them."""
    mine, expected, caches = one_step(tmp_path, family, exact=False, cache_dtype=torch.float8_e4m3fn)
    assert (mine - expected).square().mean().sqrt() < 0.01 * expected.std()
    for ours, plain in zip(caches[1].storage, caches[0].storage, strict=True):
        assert (ours != plain).float().mean() < 0.005  # of which the new keys and values are far more


def one_step(
    folder: Path,
    family: str,
    *,
    exact: bool,
    cache_dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    head: bool = False,
) -> tuple[Tensor, Tensor, list[KVCache]]:
    """Logits of the kernels and of the plain model, and the caches of the plain model and of the kernels."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **FAMILIES[family]}))
    config = load_config(folder)
    layout = config.layout(4, str(cache_dtype).removeprefix("torch."))
    formats = weight_formats(config, quantization, quantize_head=head)
    weights = random_weights(config, 3, DEVICE, torch.float32, formats=formats)
    model = Model(config, weights, layout, DEVICE, Precision.of(torch.float32, cache_dtype))
    positions = [37] if family == "llama" and not exact else [37, 3, 70]
    table = 1 + torch.randperm(3 * 20, generator=torch.Generator().manual_seed(1)).view(3, 20).to(DEVICE)
    caches = [KVCache(layout, 61, DEVICE) for _ in range(2)]
    torch.manual_seed(2)
    randomize(caches[0])
    for pool, other in zip(caches[0].storage, caches[1].storage, strict=True):
        other.copy_(pool)
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
    row_count = torch.tensor([count], device=DEVICE)
    step = DecodePass(model, caches[1], tables, count, options, row_count=row_count)
    step.inputs.slot.copy_(torch.arange(count))
    step.inputs.token.copy_(rows.token_ids)
    step.inputs.position.copy_(rows.positions)
    for items, cache_group in zip(step.inputs.items, layout.groups, strict=True):
        fill_items(
            items, split_items(positions, cache_group.window, policy), step.inputs.slot, rows.positions
        )
    return step.run(count), expected, caches


def pass_of_codes(folder: Path, rows: int, options: PassOptions, family: str = "llama") -> DecodePass:
    """A pass of a small model over a cache in fp8."""
    (folder / "config.json").write_text(json.dumps(CONFIG | FAMILIES[family]))
    config = load_config(folder)
    layout = config.layout(4, "float8_e4m3fn")
    precision = Precision.of(torch.float32, torch.float8_e4m3fn)
    model = Model(config, random_weights(config, 3, "cpu", torch.float32), layout, "cpu", precision)
    tables = (torch.zeros(rows, 2, dtype=torch.int32),)
    return DecodePass(model, KVCache(layout, 2, "cpu"), tables, rows, options)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_tuning_is_that_of_any_number_of_rows_where_rows_have_the_same_bits(
    tmp_path: Path, family: str
) -> None:
    exact = PassOptions(ProductTable([], exact=True), SplitPolicy(fixed=64))
    fast = PassOptions(ProductTable([]), None)
    steps = [pass_of_codes(tmp_path, 256, options, family) for options in (exact, fast)]
    tunings = [{step.tuning(0, rows) for rows in batches_up_to(256)} for step in steps]
    assert len(tunings[0]) == 1
    assert len({tuning.warps for tuning in tunings[1]}) > 1


def test_the_list_of_items_holds_those_of_every_number_of_rows(tmp_path: Path) -> None:
    """Few rows of a cache in fp8 are cut into more items than many."""
    step = pass_of_codes(tmp_path, 9, PassOptions(ProductTable([]), None, 24))
    each = {rows: step.most_items(0, rows) for rows in batches_up_to(9)}
    assert max(each.values()) == len(step.inputs.items[0].items) > each[9]


def test_buckets() -> None:
    assert batches_up_to(1) == [1]
    assert batches_up_to(5) == [1, 2, 4, 5]
    assert batches_up_to(256)[-4:] == [128, 160, 192, 256]
    assert batches_up_to(600)[-5:] == [256, 320, 384, 512, 600]
    assert batches_up_to(384)[-3:] == [256, 320, 384]
    assert batches_up_to(900)[-4:] == [512, 640, 768, 900]
