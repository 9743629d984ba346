"""NVIDIA ModelOpt quantises to fp8 by tensor on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.engine.model.quantization.tools.base import calibration, keep, linear_names, load_model


def pack(base: Path, target: Path) -> None:
    import modelopt.torch.quantization as quantization
    from modelopt.torch.export import export_hf_checkpoint

    model = load_model(base)
    names = linear_names(model)
    prompts = torch.stack(calibration())
    quantization.quantize(model, quantization.FP8_DEFAULT_CFG, lambda run: run(prompts))
    with TemporaryDirectory() as made, torch.inference_mode():
        export_hf_checkpoint(model, export_dir=made)
        keep(Path(made), target, dequantized(Path(made), names))


def dequantized(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """The values of the tool's own tensors of fp8."""
    from modelopt.torch.quantization.qtensor import FP8QTensor

    stored = load_file(folder / "model.safetensors")

    def one(name: str) -> Tensor:
        codes: Any = FP8QTensor(stored[f"{name}.weight"].shape, torch.float32, stored[f"{name}.weight"])
        found: Tensor = codes.dequantize(dtype=torch.float32, scale=stored[f"{name}.weight_scale"])
        return found

    return {name: one(name) for name in names}


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]) / "modelopt")
