"""Packs a matrix with the `compressed-tensors` package, in each of its formats that are supported, and keeps
what the package itself makes of the codes.

    python -m tests.engine.model.quantization.tools.pack_compressed_tensors [--check]

writes fixtures/compressed_tensors.safetensors, or with --check compares it. Wants the environment of
`compressed_tensors`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FIXTURES = Path(__file__).parent.with_name("fixtures") / "compressed_tensors.safetensors"
ROWS, COLUMNS = 24, 64
_FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
_INT: dict[str, Any] = {"type": "int", "symmetric": True}
# `weights` of a group of the configuration, and its format.
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 tensor": ("float-quantized", {**_FP8, "strategy": "tensor"}),
    "fp8 channel": ("float-quantized", {**_FP8, "strategy": "channel"}),
    "fp8 block": ("float-quantized", {**_FP8, "strategy": "block", "block_structure": [8, 32]}),
    "int8 channel": ("int-quantized", {**_INT, "num_bits": 8, "strategy": "channel"}),
    "int4 group": ("pack-quantized", {**_INT, "num_bits": 4, "strategy": "group", "group_size": 16}),
    "int4 zeros": (
        "pack-quantized",
        {**_INT, "num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "int4 channel": ("pack-quantized", {**_INT, "num_bits": 4, "strategy": "channel"}),
}


def matrix() -> Tensor:
    """Some rows larger than others, and not centred, so that zeros differ."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(ROWS, COLUMNS, generator=generator) + 0.3
    return rows * torch.linspace(0.5, 2, ROWS)[:, None]


def pack() -> dict[str, Tensor]:
    """`SCHEME/SUFFIX` of every stored tensor, and `SCHEME/matrix`, what the package dequantises."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    found: dict[str, Tensor] = {}
    for name, (form, weights) in SCHEMES.items():
        linear: Any = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        model = torch.nn.Sequential(linear)
        linear.weight.data.copy_(matrix())
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=form)
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=form)
        apply_quantization_config(model, config)
        observe(linear, calculate_qparams)
        compressor = ModelCompressor(quantization_config=config)
        compressor.compress_model(model)
        for suffix, tensor in linear.state_dict().items():
            found[f"{name}/{suffix}"] = tensor.detach().clone()
        compressor.decompress_model(model)
        found[f"{name}/matrix"] = linear.weight.detach().float().clone()
    return found


def observe(linear: Any, calculate: Any) -> None:
    """Sets scales and zeros from the least and the largest element of each group."""
    weights = linear.quantization_scheme.weights
    height, width = {
        "tensor": (ROWS, COLUMNS),
        "channel": (1, COLUMNS),
        "block": tuple(weights.block_structure or (0, 0)),
        "group": (1, weights.group_size or 0),
    }[str(weights.strategy)]
    blocks = linear.weight.data.view(ROWS // height, height, COLUMNS // width, width)
    scale, zero = calculate(blocks.amin((1, 3)), blocks.amax((1, 3)), weights)
    linear.weight_scale.data.copy_(scale.view(linear.weight_scale.shape))
    linear.weight_zero_point.data.copy_(zero.view(linear.weight_zero_point.shape))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    found = pack()
    if not parser.parse_args().check:
        schemes = json.dumps(dict(SCHEMES.items()))
        save_file(
            {name: tensor.contiguous() for name, tensor in found.items()}, FIXTURES, {"schemes": schemes}
        )
        return
    with safe_open(FIXTURES, "pt") as kept:
        differ = [name for name in found if not torch.equal(kept.get_tensor(name), found[name])]
    sys.exit(f"these differ: {differ}" if differ else 0)


if __name__ == "__main__":
    main()
