"""Every format: what the engine computes from a quantised checkpoint is what `transformers` computes from the
dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.engine.kernels.quantized_weight import QuantizedWeight
from baton.engine.model.families.registry import load_config
from baton.engine.model.weight_formats import weight_formats
from baton.engine.model.weights import load_weights
from tests.engine.model.quantization.packing import AWQ, CHANNEL_FP8, FORMATS, GPTQ, Format
from tests.engine.passes import Passes
from tests.support.checkpoints import FAMILIES, Case, make_checkpoint
from tests.support.fewer import each_value_once
from tests.support.reference import greedy_matches, load_reference, reference_logits

TOLERANCE = 1e-9
PROMPT = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_quantised_checkpoint_computes_what_its_codes_stand_for(
    form: Format, llama: Path, tmp_path: Path
) -> None:
    packed, plain = form.write(llama, tmp_path)
    reference = load_reference(plain)
    (logits,) = Passes(packed, torch.float64).run([(0, 0, PROMPT)])
    assert float((logits - reference_logits(reference, PROMPT)).abs().max()) < TOLERANCE
    output = Passes(packed, torch.float32).greedy(0, PROMPT, 16)
    greedy_matches(load_reference(plain, torch.float32), PROMPT, output)
    quantized = quantized_matrices(packed)
    if form.name == "fp8 with exceptions":  # q and v lie beside a k at full width
        assert {name.split(".")[2] + name.split(".")[-2] for name in quantized} == {
            *("0o_proj", "1o_proj", "1gate_proj", "1up_proj", "1down_proj")
        }
    else:
        layers, of_layer = {"modelopt": 1}.get(form.name, 2), {"mixed": 6}.get(form.name, 7)
        assert len(quantized) == layers * of_layer


def quantized_matrices(folder: Path) -> set[str]:
    """The matrices that the engine keeps in fewer bits."""
    config = load_config(folder)
    weights = load_weights(config, folder, "cpu", torch.bfloat16, formats=weight_formats(config))
    return {name for name, weight in weights.items() if isinstance(weight, QuantizedWeight)}


ORDERED = [case for case in FAMILIES if case.name in ("phi3-partial", "gemma3-windows", "llama-tied-biases")]


@pytest.mark.parametrize(
    ("case", "form"), each_value_once(ORDERED, [CHANNEL_FP8, FORMATS[2], AWQ, GPTQ]), ids=str
)
def test_other_families(case: Case, form: Format, tmp_path: Path) -> None:
    """Fused projections whose rows are in another order, norms behind products, biases."""
    packed, plain = form.write(case.make(tmp_path / "source"), tmp_path)
    (logits,) = Passes(packed, torch.float64).run([(0, 0, PROMPT)])
    expected = reference_logits(load_reference(plain), PROMPT)
    assert float((logits - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("form", [FORMATS[2], AWQ], ids=str)
def test_without_formats_weights_are_dequantised(form: Format, llama: Path, tmp_path: Path) -> None:
    packed, plain = form.write(llama, tmp_path)
    mine = load_weights(load_config(packed), packed, "cpu", torch.float32)
    theirs = load_weights(load_config(plain), plain, "cpu", torch.float32)
    for name, weight in theirs.items():
        found = mine[name]
        assert isinstance(found, torch.Tensor)
        assert isinstance(weight, torch.Tensor)
        assert torch.equal(found, weight), name
