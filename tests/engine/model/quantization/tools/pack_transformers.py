"""`transformers` writes `quant_method` fp8, by block and by tensor.

It quantises models on GPUs alone, so its conversion (`Fp8Quantize`, plain torch) is applied to each matrix,
and its own configuration is saved. It loads what is written itself, dequantised, on a CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.engine.model.quantization.tools.base import keep, linear_names, load_model

# Of a folder: rows and columns of a block, or None for a scale of the whole matrix.
BLOCKS: dict[str, tuple[int, int] | None] = {"fp8-block": (16, 32), "fp8-tensor": None}


def pack(base: Path, target: Path, block: tuple[int, int] | None) -> None:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    model = load_model(base)
    names = linear_names(model)
    config: Any = FineGrainedFP8Config(weight_block_size=block, modules_to_not_convert=["lm_head"])
    convert = Fp8Quantize(SimpleNamespace(quantization_config=config))
    tensors = dict(model.state_dict())
    for name in names:
        tensors |= convert.convert({f"{name}.weight": tensors[f"{name}.weight"]})
    model.config.quantization_config = config.to_dict()
    with TemporaryDirectory() as made:
        model.save_pretrained(made, state_dict=tensors)
        keep(Path(made), target, dequantized(Path(made), names))


def dequantized(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """The weights that `transformers` loads in float32."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    loader: Any = AutoModelForCausalLM
    config = FineGrainedFP8Config(dequantize=True)
    tensors = loader.from_pretrained(folder, dtype=torch.float32, quantization_config=config).state_dict()
    return {name: tensors[f"{name}.weight"] for name in names}


if __name__ == "__main__":
    for name, size in BLOCKS.items():
        pack(Path(sys.argv[1]), Path(sys.argv[2]) / name, size)
