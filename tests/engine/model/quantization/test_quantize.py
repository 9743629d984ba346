"""Checkpoints that are quantised while they are loaded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.base.errors import BatonError
from baton.engine.kernels.quantized_weight import QuantizedWeight, pack_int4
from baton.engine.kernels.weight_format import FORMATS, WeightFormat
from baton.engine.model.families.registry import load_config
from baton.engine.model.modules import Model, Precision
from baton.engine.model.quantization.quantize import quantize
from baton.engine.model.weight_formats import format_name, weight_formats
from baton.engine.model.weight_places import put_weight
from baton.engine.model.weights import load_weights, random_weights, weight_bytes
from tests.engine.passes import Passes
from tests.support.checkpoints import make_checkpoint
from tests.support.reference import greedy_matches, load_reference

# Half a step of e4m3, of an element; half a step of int8, of the largest; int4 may cut off the largest ones.
WORST = {"fp8": 2.0**-4, "int8": 0.5 / 127, "int4": 0.25}


@pytest.mark.parametrize(
    "weight_format",
    [*FORMATS.values(), WeightFormat("fp8", 32, 48), WeightFormat("int4", 1, 32, zeros=True)],
    ids=lambda weight_format: weight_format.name,
)
@pytest.mark.parametrize("shape", [(64, 128), (37, 100), (5, 260)], ids=str)
def test_codes_are_close_to_what_they_stand_for(weight_format: WeightFormat, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    quantized = quantize(weight, weight_format)
    assert quantized.shape == shape
    assert quantized.nbytes == weight_format.nbytes(*shape)
    error = (quantized.dequantized(torch.float32) - weight).abs()
    if weight_format.codes == "fp8":
        smallest = weight.abs().amax() / 448 * 2.0**-9
        assert bool((error <= WORST["fp8"] * weight.abs() + smallest).all())
    else:
        assert float(error.max()) <= WORST[weight_format.codes] * float(weight.abs().max())
    assert float(error.square().mean().sqrt() / weight.square().mean().sqrt()) < 0.12


@pytest.mark.parametrize(
    "weight_format",
    [WeightFormat("fp8", 32, 48), FORMATS["int4"]],
    ids=lambda weight_format: weight_format.name,
)
def test_a_large_matrix_is_dequantised_in_parts(weight_format: WeightFormat) -> None:
    weight = quantize(torch.randn(100, 260, generator=torch.Generator().manual_seed(1)), weight_format)
    whole = weight.dequantized(torch.bfloat16)
    assert torch.equal(weight.dequantized(torch.bfloat16, elements_at_once=3000), whole)


def test_places_of_int4_codes() -> None:
    codes = torch.arange(260).remainder(16).to(torch.uint8)[None]
    packed = pack_int4(codes)
    assert packed.shape == (1, 3, 64)
    assert packed[0, 1, 5] == int(codes[0, 128 + 5]) | int(codes[0, 192 + 5]) << 4
    assert packed[0, 2, 4] == 8 | 8 << 4  # beyond the last column


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_head(name: str, tied: bool, tmp_path: Path) -> None:
    """Tokens are looked up in the embedding as it is, and logits computed by what the head's codes stand for;
    `transformers` runs both."""
    folder = make_checkpoint(tmp_path / "model", "qwen2", tie_word_embeddings=tied)
    config = load_config(folder)
    formats = weight_formats(config, name, quantize_head=True)
    assert formats["lm_head.weight"] == FORMATS[name]
    assert format_name(formats, "float32") == f"{FORMATS[name].name}+head"
    weights = load_weights(config, folder, "cpu", torch.float32, formats=formats)
    tensors = load_file(folder / "model.safetensors")
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    assert isinstance(embedding, Tensor)
    assert isinstance(head, QuantizedWeight)
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"])
    source = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    restored = {
        key: weight.dequantized(torch.float32)
        for key, weight in weights.items()
        if isinstance(weight, QuantizedWeight)
    }
    assert torch.equal(restored["lm_head.weight"], quantize(source, FORMATS[name]).dequantized(torch.float32))
    passes = Passes(folder, torch.float32, quantization=name, quantize_head=True)
    prompt = list(range(5, 60))
    output = passes.greedy(0, prompt, 16)
    edited = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(edited))
    save_file({**tensors, **restored}, folder / "model.safetensors", metadata={"format": "pt"})
    greedy_matches(load_reference(folder, torch.float32), prompt, output)


@pytest.mark.parametrize("name", FORMATS)
def test_a_large_matrix_is_quantised_in_parts(name: str) -> None:
    weight = torch.randn(100, 260, generator=torch.Generator().manual_seed(2))
    whole, parts = (QuantizedWeight.empty(FORMATS[name], 100, 260, "cpu") for _ in range(2))
    put_weight(whole, weight)
    put_weight(parts, weight, elements_at_once=3000)
    assert all(map(torch.equal, whole.tensors(), parts.tensors()))
    assert whole.scales.all()


@pytest.mark.parametrize("name", FORMATS)
def test_text_is_that_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    """`transformers` runs what the codes stand for."""
    folder = make_checkpoint(tmp_path / "model", "qwen2")
    config = load_config(folder)
    formats = weight_formats(config, name)
    tensors = load_file(folder / "model.safetensors")
    weights = load_weights(config, folder, "cpu", torch.float32, formats=formats)
    quantized = {key: weight for key, weight in weights.items() if isinstance(weight, QuantizedWeight)}
    assert len(quantized) == 14
    restored = {key: weight.dequantized(torch.float32) for key, weight in quantized.items()}
    assert all(not torch.equal(restored[key], tensors[key]) for key in quantized)
    passes = Passes(folder, torch.float32, quantization=name)
    prompt = list(range(5, 60))
    output = passes.greedy(0, prompt, 16)
    save_file({**tensors, **restored}, folder / "model.safetensors", metadata={"format": "pt"})
    greedy_matches(load_reference(folder, torch.float32), prompt, output)


def test_an_element_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    folder, name = make_checkpoint(tmp_path), "model.layers.1.mlp.down_proj.weight"
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    tensors[name][3, 4] = math.inf
    save_file(tensors, folder / "model.safetensors")
    config = load_config(folder)
    with pytest.raises(BatonError, match=f"tensor {name} has elements that are not finite"):
        load_weights(config, folder, "cpu", torch.bfloat16, formats=weight_formats(config, "fp8"))


@pytest.mark.parametrize(("head", "tied"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_that_are_planned(name: str, head: bool, tied: bool, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": tied}
    config = load_config(make_checkpoint(tmp_path, **sizes))
    formats = weight_formats(config, name, quantize_head=head)
    weights = random_weights(config, 3, "cpu", torch.bfloat16, formats=formats)
    model = Model(config, weights, config.layout(16, "bfloat16"), "cpu", Precision.of(torch.bfloat16))
    assert model.nbytes == weight_bytes(config, torch.bfloat16, formats)
    layers = sum(product.linear.weight.nbytes for layer in model.layers for product in layer.products())
    full = sum(
        2 * math.prod(product.linear.weight.shape) for layer in model.layers for product in layer.products()
    )
    assert layers / full < {"fp8": 0.515, "int8": 0.515, "int4": 0.285}[name]
