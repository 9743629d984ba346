"""`gptqmodel` quantises with GPTQ on a CPU.

Folders of TARGET: `gptq` (zeros less 1, symmetric), `gptq-zeros` (zeros less 1, a zero of each group) and
`gptq-v2-zeros` (zeros as they are).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tests.engine.model.quantization.tools.base import calibration, keep

# Of a folder: the version as the tool calls it, and whether codes are symmetric.
VERSIONS = {"gptq": ("gptq", True), "gptq-zeros": ("gptq", False), "gptq-v2-zeros": ("gptq_v2", False)}


def pack(base: Path, target: Path, version: str, *, symmetric: bool) -> None:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(
        bits=4,
        group_size=16,
        sym=symmetric,
        desc_act=False,
        format=version,
        device="cpu",
        act_group_aware=False,
        pack_impl="original",
    )
    model = GPTQModel.load(str(base), config)
    prompts = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in calibration()]
    model.quantize(prompts, batch_size=1)
    with TemporaryDirectory() as made:
        model.save(made)
        loaded = GPTQModel.load(made, backend=BACKEND.TORCH, device="cpu", dtype=torch.float16)
        keep(Path(made), target, dequantized(loaded.model))


def dequantized(model: Any) -> dict[str, Tensor]:
    """The weights by which the tool's own module for a CPU multiplies."""
    modules = {name: one for name, one in model.named_modules() if hasattr(one, "dequantize_weight")}
    return {name: one.dequantize_weight().t() for name, one in modules.items()}


if __name__ == "__main__":
    os.environ["GPTQMODEL_CPU_WORKERS"] = "4"  # it fails where it chooses fewer than two itself
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it would compile its module for minutes
    for folder, (name, same) in VERSIONS.items():
        pack(Path(sys.argv[1]), Path(sys.argv[2]) / folder, name, symmetric=same)
