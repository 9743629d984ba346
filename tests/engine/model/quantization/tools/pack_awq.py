"""`autoawq` quantises with AWQ on a CPU. Clipping is left out: it takes matrices of 64 rows at least."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from tests.engine.model.quantization.tools.base import calibration, keep

GROUP = 16


def pack(base: Path, target: Path) -> None:
    from awq import AutoAWQForCausalLM
    from transformers import AutoTokenizer

    model = AutoAWQForCausalLM.from_pretrained(str(base), device_map="cpu", safetensors=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    model.quantize(
        tokenizer,
        quant_config={"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"},
        calib_data=[" ".join(f"w{token}" for token in ids.tolist()) for ids in calibration()],
        max_calib_seq_len=32,
        apply_clip=False,
    )
    with TemporaryDirectory() as made:
        model.save_quantized(made)
        keep(Path(made), target, dequantized(model.model))


def dequantized(model: Any) -> dict[str, Tensor]:
    """The weights by which the tool multiplies where it has no kernel."""
    from awq.utils.packing_utils import dequantize_gemm

    modules = {name: one for name, one in model.named_modules() if hasattr(one, "qzeros")}
    return {
        name: dequantize_gemm(one.qweight, one.qzeros, one.scales, 4, GROUP).t()
        for name, one in modules.items()
    }


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]) / "awq")
