"""FBGEMM quantises to fp8 by row, as `transformers` writes it (`fbgemm_fp8`).

The package is for GPUs, and loads their libraries when it is imported. Its `quantize_fp8_row` computes
tensors of a CPU in plain torch, so only the module of that function is imported. It has no dequantiser for a
CPU: numpy is one. `transformers` stores what the function returns, the scales as [N, 1].
"""

from __future__ import annotations

import sys
import types
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.engine.model.quantization.packing import e4m3_values
from tests.engine.model.quantization.tools.base import keep, linear_names, load_model


def pack(base: Path, target: Path) -> None:
    from transformers import FbgemmFp8Config

    quantize = row_quantizer()
    model = load_model(base)
    names = linear_names(model)
    tensors = dict(model.state_dict())
    for name in names:
        codes, scales = quantize(tensors[f"{name}.weight"])
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scales.view(-1, 1)}
    config: Any = FbgemmFp8Config(modules_to_not_convert=["lm_head"])
    model.config.quantization_config = config.to_dict()
    with TemporaryDirectory() as made:
        model.save_pretrained(made, state_dict=tensors)
        keep(Path(made), target, dequantized(Path(made), names))


def row_quantizer() -> Any:
    """FBGEMM's function; the package's own `__init__`, which loads libraries, is not run."""
    package, found = types.ModuleType("fbgemm_gpu"), find_spec("fbgemm_gpu")
    assert found is not None
    assert found.submodule_search_locations is not None
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["fbgemm_gpu"] = package
    from fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm import quantize_fp8_row

    return quantize_fp8_row


def dequantized(folder: Path, names: list[str]) -> dict[str, Tensor]:
    stored = load_file(folder / "model.safetensors")

    def one(name: str) -> Tensor:
        codes = stored[f"{name}.weight"].view(torch.uint8).numpy()
        scales: Any = stored[f"{name}.weight_scale"].numpy().astype(np.float32)
        return torch.from_numpy(e4m3_values()[codes] * scales)

    return {name: one(name) for name in names}


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]) / "fbgemm")
