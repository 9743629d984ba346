"""Weights in fewer bits by their logits: teacher-forced through the decode kernels of mode `fast`, the error
against the float32 model of the dequantised weights is at most 1.5 times that of `transformers`' own run in
that format.

That run has the dequantised weights in 16 bits, and rounds what goes into each product as the format does:
codes of 8 bits with a scale a row, which compressed-tensors calls dynamic quantisation by token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from baton.engine.forward.products import code_products
from baton.engine.kernels.fusion import Norm
from baton.engine.kernels.reference.row_ops import rms_norm
from baton.engine.kernels.weight_format import FORMATS
from baton.engine.model.families.registry import load_config
from baton.engine.model.quantization.quantize import quantize
from baton.engine.model.weight_formats import weight_formats
from baton.engine.model.weights import load_weights
from tests.engine.decode.test_gpu_logits import BY_NAME, DEVICE, ratios, reference, tokens
from tests.engine.forced import decoded_logits
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.reference import load_reference
from tests.support.rounded_kv import E4M3, nearest

BY_CODES = ("fp8", "int8")


def rounded_row(x: Tensor, codes: str) -> Tensor:
    """x [..., K] as codes with a scale (float32) a row stand for it."""
    wide = x.double().cpu().numpy()
    largest = np.abs(wide).max(-1, keepdims=True).astype(np.float32)
    scale = (largest / np.float32(448 if codes == "fp8" else 127)).astype(np.float64)
    if codes == "int8":
        return torch.from_numpy(np.rint(wide / scale) * scale).to(x)
    return torch.from_numpy(nearest(wide / scale, E4M3) * scale).to(x)


def quantised(model: Any, name: str, *, activations: bool) -> Any:
    """The model with the products of its layers as the format has them."""
    for layer in (module for module in model.model.modules() if isinstance(module, nn.Linear)):
        weight = quantize(layer.weight.detach(), FORMATS[name]).dequantized(layer.weight.dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if activations:
            layer.register_forward_pre_hook(lambda _, inputs: (rounded_row(inputs[0], name),))
    return model


def prove(folder: Path, dtype: torch.dtype, token_ids: Tensor, name: str) -> float:
    truth = reference(
        quantised(load_reference(folder, dtype), name, activations=False).float().to(DEVICE), token_ids
    )
    theirs_model = quantised(load_reference(folder, dtype), name, activations=name in BY_CODES)
    theirs = reference(theirs_model.to(DEVICE), token_ids)
    config = load_config(folder)
    weights = load_weights(config, folder, DEVICE, dtype, formats=weight_formats(config, name))
    mine = {"fast": decoded_logits(config, weights, token_ids, exact=False)}
    return ratios(truth, theirs, mine, f"{dtype}, weights in {name}")["fast"]


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_a_few_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch converts rows to e4m3, since Triton's interpreter rounds differently from a GPU."""

    def rows(codes: Tensor, scales: Tensor, x: Tensor, norm: Norm | None = None) -> None:
        found = quantize(x if norm is None else rms_norm(x, norm.gain, norm.eps), FORMATS[name])
        codes.copy_(found.codes)
        scales.copy_(found.scales[:, 0])

    if name == "fp8" and DEVICE == "cpu":
        monkeypatch.setattr(code_products, "quantize_rows", rows)
    folder = BY_NAME["llama-default"].make(tmp_path, seed=5, dtype="float16")
    prove(folder, torch.float16, tokens(2, 4, VOCAB_SIZE), name)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_on_a_gpu(name: str, rows: int, tmp_path: Path) -> None:
    """bf16; up to 64 rows our kernels multiply codes, above the library."""
    folder = BY_NAME["llama-default"].make(tmp_path, seed=5, dtype="bfloat16")
    prove(folder, torch.bfloat16, tokens(rows, 200, VOCAB_SIZE), name)
