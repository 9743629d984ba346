"""A mixture's tensors: where they lie, what is refused, what is quantised, and how random ones route."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.base.errors import BatonError, ErrorKind
from baton.engine.forward.layers.experts import ExpertsSpace
from baton.engine.kernels.expert_tiles import LIBRARY_ROWS, space_bytes
from baton.engine.kernels.product_rows import product_rows
from baton.engine.kernels.quantized_weight import QuantizedWeight
from baton.engine.kernels.reference.experts import route
from baton.engine.model.checkpoint import checkpoint_digest
from baton.engine.model.families.registry import load_config
from baton.engine.model.layers.experts import ExpertsMlp
from baton.engine.model.modules import Model, Precision
from baton.engine.model.tensors import active_weights, layer_matrices, least_rows, parameter_counts
from baton.engine.model.weight_formats import weight_formats
from baton.engine.model.weight_places import weight_places
from baton.engine.model.weights import load_weights, random_weights, weight_bytes
from bench.shapes import SHAPES
from services.common.config.worker import EngineConfig
from services.worker.engine.startup import model_loader
from services.worker.engine.startup.memory_plan import Gpu, MemoryPlan, MemoryPlanner, prefill_bytes
from tests.engine.model.quantization.packing import CHANNEL_FP8, FORMATS, GPTQ, Format, compressed
from tests.engine.passes import Passes
from tests.support.checkpoints import MIXTURES, Case
from tests.support.reference import greedy_matches, load_reference, reference_logits

DENSE_BETWEEN, SMALL, MIXTRAL = MIXTURES[2], MIXTURES[3], MIXTURES[4]
WIDE = {"hidden_size": 256, "tie_word_embeddings": False}
ROUTED = torch.randint(0, 320, (512,), generator=torch.Generator().manual_seed(1)).tolist()
PROMPT = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("case", [DENSE_BETWEEN, MIXTRAL], ids=str)
def test_experts_lie_in_one_stack_each_where_it_was_loaded(case: Case, tmp_path: Path) -> None:
    folder = case.make(tmp_path)
    config, stored = load_config(folder), load_file(folder / "model.safetensors")
    weights = load_weights(config, folder, "cpu", torch.float32)
    model = Model(config, weights, config.layout(16, "float32"), "cpu", Precision.of(torch.float32))
    assert config.experts is not None
    names, count, inner = config.experts.names, config.experts.count, config.experts.intermediate_size
    for number, layer in enumerate(model.layers):
        mlp = layer.mlp
        assert isinstance(mlp, ExpertsMlp) == (config.experts_of(number) is not None)
        if not isinstance(mlp, ExpertsMlp):
            continue
        block = f"model.layers.{number}.{names.block}."
        assert mlp.gate_up.shape == (count, 2 * inner, config.hidden_size)
        assert mlp.down.shape == (count, config.hidden_size, inner)
        assert torch.equal(mlp.router, stored[f"{block}gate.weight"])
        for expert in range(count):
            own = f"{block}experts.{expert}."
            gate_up, down = mlp.gate_up.matrix(expert), mlp.down.matrix(expert)
            assert isinstance(gate_up, Tensor)
            assert isinstance(down, Tensor)
            parts = stored[f"{own}{names.gate}.weight"], stored[f"{own}{names.up}.weight"]
            assert torch.equal(gate_up, torch.cat(parts))
            assert torch.equal(down, stored[f"{own}{names.down}.weight"])
            place = weights[f"{own}{names.gate}.weight"]
            assert isinstance(place, Tensor)
            assert place.data_ptr() == gate_up.data_ptr()  # in memory once
    assert model.nbytes == weight_bytes(config, torch.float32)


def test_an_experts_tensor_that_is_wrong_is_refused_by_name(tmp_path: Path) -> None:
    folder = SMALL.make(tmp_path)
    config, path = load_config(folder), folder / "model.safetensors"
    tensors, name = load_file(path), "model.layers.1.mlp.experts.6.up_proj.weight"
    digest = checkpoint_digest(config, folder)

    def refused(changed: dict[str, Tensor]) -> str:
        save_file(changed, path)
        with pytest.raises(BatonError) as caught:
            load_weights(config, folder, "cpu", torch.float32)
        assert caught.value.kind is ErrorKind.INVALID
        assert "\n" not in caught.value.message
        return caught.value.message

    others = {key: tensor for key, tensor in tensors.items() if key != name}
    assert f"no tensor {name} in" in refused(others)
    shorter = {**others, name: tensors[name][1:]}
    assert f"tensor {name} has shape [47, 64], expected [48, 64]" in refused(shorter)
    assert f"tensor {name} is stored as I8" in refused({**others, name: tensors[name].to(torch.int8)})
    beyond = name.replace("experts.6", "experts.8")
    assert f"tensor {beyond} is not part of" in refused({**tensors, beyond: tensors[name].clone()})
    save_file({**others, name: tensors[name] + 1}, path)
    assert checkpoint_digest(config, folder) != digest


def test_a_truncated_file_is_refused_by_its_last_tensor(tmp_path: Path) -> None:
    path = SMALL.make(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(BatonError, match=r"tensor \S+ ends at byte \d+, the file at \d+: it is cut off"):
        load_weights(load_config(tmp_path), tmp_path, "cpu", torch.float32)


def test_memory_counts_all_experts_and_time_those_taken(tmp_path: Path) -> None:
    config = load_config(DENSE_BETWEEN.make(tmp_path))
    hidden, heads, kv = config.hidden_size, 4 * config.head_dim, 2 * config.head_dim
    attention = 2 * hidden * heads + 2 * hidden * kv
    dense, expert, router = 3 * hidden * config.intermediate_size, 3 * hidden * 36, 60 * hidden
    assert active_weights(config) == 3 * attention + dense + 2 * (4 * expert + router)
    matrices = layer_matrices(config)
    assert matrices["model.layers.0.mlp.experts.gate_up.weight"] == (72, hidden)
    assert matrices["model.layers.2.mlp.experts.down.weight"] == (hidden, 36)
    total = 3 * attention + dense + 2 * (60 * expert + router) + config.vocab_size * hidden
    norms = 3 * (2 * hidden + 2 * config.head_dim) + hidden
    assert weight_bytes(config, torch.bfloat16) == 2 * (total + norms)
    formats = weight_formats(config, "fp8")
    weights = random_weights(config, 3, "cpu", torch.bfloat16, formats=formats)
    assert sum(weight.nbytes for weight in weights.values()) == weight_bytes(config, torch.bfloat16, formats)


@pytest.mark.parametrize("form", [CHANNEL_FP8, FORMATS[2], GPTQ], ids=str)
def test_published_formats_are_computed_as_what_their_codes_stand_for(form: Format, tmp_path: Path) -> None:
    packed, plain = form.write(SMALL.make(tmp_path / "source"), tmp_path)
    (logits,) = Passes(packed, torch.float64).run([(0, 0, PROMPT)])
    assert float((logits - reference_logits(load_reference(plain), PROMPT)).abs().max()) < 1e-9


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_each_expert_is_quantised_by_itself_and_no_router(name: str, tmp_path: Path) -> None:
    folder = SMALL.make(tmp_path)
    config = load_config(folder)
    formats = weight_formats(config, name)
    weights = load_weights(config, folder, "cpu", torch.float32, formats=formats)
    codes = {key: one for key, one in weights.items() if isinstance(one, QuantizedWeight)}
    plain = {key: one.dequantized(torch.float32) for key, one in codes.items()}
    experts = [key for key in plain if ".experts." in key]
    assert len(experts) == 2 * 8 * 3
    assert not any(key.endswith("mlp.gate.weight") for key in plain)
    output = Passes(folder, torch.float32, quantization=name).greedy(0, PROMPT, 16)
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **plain}, folder / "model.safetensors", metadata={"format": "pt"})
    greedy_matches(load_reference(folder, torch.float32), PROMPT, output)


@pytest.mark.parametrize("published", [False, True])
def test_int8_is_refused_by_name(published: bool, tmp_path: Path) -> None:
    folder = SMALL.make(tmp_path)
    if published:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = compressed("int-quantized", num_bits=8, strategy="channel")
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BatonError, match="int8 is not supported for mixtures of experts") as caught:
        weight_formats(load_config(folder), None if published else "int8")
    assert caught.value.kind is ErrorKind.INVALID


def test_a_gpu_refuses_experts_in_a_format_without_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loader, "devices_of", lambda engine: [torch.device("cuda", 0)])
    folder = SMALL.make(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    form = compressed("pack-quantized", num_bits=4, strategy="group", group_size=48)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": form}))
    with pytest.raises(
        BatonError, match=r"config\.json: .*experts\.gate_up\.weight: experts in int4-g48"
    ) as caught:
        model_loader.load(str(folder), EngineConfig())
    assert caught.value.kind is ErrorKind.INVALID
    assert "\n" not in caught.value.message


def test_random_routers_take_experts_about_equally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements with random weights stand for traffic only if no expert is much busier than the others."""
    case = dataclasses.replace(DENSE_BETWEEN, overrides={**DENSE_BETWEEN.overrides, **WIDE})
    folder = case.make(tmp_path)
    config = load_config(folder)
    save_file(random_weights(config, 0, "cpu", torch.float32), folder / "model.safetensors")
    taken: list[Tensor] = []

    def counting(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        ids, weights = route(*args, **options)
        taken.append(ids[: len(ROUTED)])
        return ids, weights

    monkeypatch.setattr("baton.engine.model.layers.experts.route", counting)
    Passes(folder, torch.float32).run([(0, 0, ROUTED)])
    assert len(taken) == 2
    for ids in taken:
        rows = torch.bincount(ids.flatten(), minlength=60)
        mean = len(ROUTED) * 4 / 60
        assert float(rows.max()) < 2.5 * mean
        assert float(rows.float().std()) / mean < 0.35  # 0.17 where each row draws its own


def test_a_prefill_step_is_longer_where_memory_allows(tmp_path: Path) -> None:
    """The step's buffers come out of the blocks, and take at most an eighth of what the weights leave."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-30b-a3b"].config))
    config = load_config(tmp_path)
    layout, weights = config.layout(64, "bfloat16"), weight_bytes(config, torch.bfloat16)

    def plan(total: int, **settings: Any) -> MemoryPlan:
        gpu, engine = Gpu("GPU 0", total * 10**9, total * 10**9), EngineConfig(**settings)
        return MemoryPlanner(config, engine, layout, 32_768, weights, gpu).plan()

    assert [plan(total).chunk_tokens for total in (150, 85, 76, 72)] == [8192, 8192, 4096, 2048]
    assert plan(150, chunk_tokens=512).chunk_tokens == 512
    assert MemoryPlanner(config, EngineConfig(), layout, 32_768, weights, None).plan().chunk_tokens == 256
    block = sum(group.block_bytes for group in layout.groups)
    fewer = plan(85, chunk_tokens=2048, slots=64).kv_blocks - plan(85, slots=64).kv_blocks
    most, least = (prefill_bytes(config, EngineConfig(), product_rows(rows + 64)) for rows in (8192, 2048))
    assert fewer == pytest.approx((most - least) / block, abs=2)


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
@pytest.mark.parametrize("rows", [3, 256, 512, LIBRARY_ROWS])
def test_memory_of_experts_is_what_a_pass_allocates(
    rows: int, quantization: Literal["fp8", "int4"] | None, tmp_path: Path
) -> None:
    config = load_config(SMALL.make(tmp_path))
    formats = weight_formats(config, quantization)
    weights = weight_places(config, "cpu", torch.bfloat16, formats)
    model = Model(config, weights, config.layout(16, "bfloat16"), "cpu", Precision.of(torch.bfloat16))
    space = ExpertsSpace.of(model, rows)
    assert space is not None
    assert config.experts is not None
    parts = [part for part in (space, space.router, space.tiles, space.large_tiles) if part is not None]
    found = [getattr(part, one.name) for part in parts for one in dataclasses.fields(part)]
    held = sum(one.nbytes for one in found if isinstance(one, Tensor))
    if space.large_tiles is not None:  # results that the library allocates
        held += space.large_tiles.entry.numel() * config.hidden_size * 2
    assert (space.large_tiles is not None) == (rows == LIBRARY_ROWS and quantization is None)
    sizes = config.experts.top_k, config.experts.count, config.hidden_size, config.experts.intermediate_size
    assert held == pytest.approx(space_bytes(rows, *sizes, 2, codes=quantization or ""), rel=0.02)
    without = ExpertsSpace.of(model, rows, exact=True)
    assert without is not None
    assert without.codes.numel() == without.entry_rows == 0
    assert (space.codes.numel() > 0) == (quantization == "fp8")


def test_a_mixtures_pass_of_few_rows_takes_as_long_as_reading_all_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-30b-a3b"].config))
    config = load_config(tmp_path)
    assert least_rows(config, 224) == pytest.approx(224 * 29.9e9 / 2.73e9, rel=0.01)
    total, active = parameter_counts(config)
    assert (round(total / 1e9, 2), round(active / 1e9, 2)) == (30.53, 3.35)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-8b"].config))
    assert least_rows(load_config(tmp_path), 224) == 224


def test_a_mixture_that_is_too_large_is_told_what_would_fit(tmp_path: Path) -> None:
    """Not int8, which experts do not have."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["mixtral-8x7b"].config))
    config, engine = load_config(tmp_path), EngineConfig()
    layout = config.layout(64, "bfloat16")
    smaller = model_loader.quantized_bytes(config, engine, torch.bfloat16)
    weights = weight_bytes(config, torch.bfloat16)
    for total, fitting in ((85, "fp8 47 GB, int4 25.2 GB"), (40, "int4 25.2 GB"), (20, None)):
        gpu = Gpu("GPU 0", total * 10**9, total * 10**9)
        planner = MemoryPlanner(config, engine, layout, 32_768, weights, gpu, smaller)
        with pytest.raises(BatonError, match=r"weights take 93\.4 GB, all else") as caught:
            planner.plan()
        assert caught.value.kind is ErrorKind.INVALID
        told = caught.value.message.partition("; quantized they would take: ")[2]
        assert told == (fitting or "")
    assert not model_loader.quantized_bytes(config, EngineConfig(quantization="fp8"), torch.bfloat16)
