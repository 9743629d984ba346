"""Quantised checkpoints of every format, written by code of their own: numpy alone, no line of the engine's.

Each is made of a checkpoint at full width, and comes with another one at full width of what its codes stand
for, which `transformers` runs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Packed:
    """A matrix as a format stores it: tensors by suffix, and what they stand for, float32."""

    tensors: dict[str, Tensor]
    matrix: Array


Packer = Callable[[Array], Packed]


@dataclass(frozen=True)
class Format:
    """A format with its `quantization_config`. `packers`: the packer of a module by a part of its name, ""
    for all others."""

    name: str
    config: dict[str, Any]
    packers: Mapping[str, Packer]
    beside: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def write(self, source: Path, target: Path) -> tuple[Path, Path]:
        """The checkpoint `source` in this format, and at full width what it stands for."""
        packed, plain = target / "packed", target / "plain"
        for folder in (packed, plain):
            shutil.copytree(source, folder)
        tensors = load_file(source / "model.safetensors")
        stored, restored = {}, {}
        for name, tensor in tensors.items():
            stored[name] = restored[name] = tensor
            packer = self._packer(name)
            if packer is None:
                continue
            found = packer(tensor.float().numpy())
            del stored[name]
            module = name.removesuffix("weight")
            stored |= {module + suffix: part for suffix, part in found.tensors.items()}
            restored[name] = torch.from_numpy(found.matrix)
        save_file({name: part.contiguous() for name, part in stored.items()}, packed / "model.safetensors")
        save_file(restored, plain / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        if self.config:
            config["quantization_config"] = self.config
        (packed / "config.json").write_text(json.dumps(config))
        for name, content in self.beside.items():
            (packed / name).write_text(json.dumps(content))
        return packed, plain

    def _packer(self, name: str) -> Packer | None:
        if not name.endswith("_proj.weight"):
            return None
        module = name.removesuffix(".weight")
        return next((self.packers[part] for part in self.packers if part in module), None)


def e4m3_values() -> Array:
    """The value of each byte of e4m3, two of them NaN: 4 bits of exponent, biased by 7, 3 of mantissa."""
    values = []
    for byte in range(256):
        sign, exponent, mantissa = (-1.0 if byte >> 7 else 1.0), byte >> 3 & 15, byte & 7
        value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(float("nan") if byte & 127 == 127 else sign * value)
    return np.array(values, np.float32)


def scaled(
    codes: str, rows: int, columns: int, suffix: str = "weight_scale", shape: tuple[int, ...] | None = None
) -> Packer:
    """Packs to fp8 or int8 with a scale for each block of `rows` rows and `columns` columns; 0: all of them.
    `shape`: of the scales as stored."""

    def pack(matrix: Array) -> Packed:
        height, width = rows or matrix.shape[0], columns or matrix.shape[1]
        down, across = -(-matrix.shape[0] // height), -(-matrix.shape[1] // width)
        scales, stored = np.zeros((down, across), np.float32), np.zeros(matrix.shape, np.uint8)
        restored, table = np.zeros_like(matrix), e4m3_values()
        for i in range(down):
            for j in range(across):
                place = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
                scale = np.float32(np.abs(matrix[place]).max() / (448 if codes == "fp8" else 127))
                scales[i, j] = scale
                units = matrix[place] / scale
                if codes == "fp8":
                    finite = np.nan_to_num(table, nan=np.inf)
                    stored[place] = np.abs(units[..., None] - finite).argmin(-1)
                    restored[place] = table[stored[place]] * scale
                else:
                    stored[place] = units.round().astype(np.int8).view(np.uint8)
                    restored[place] = stored[place].view(np.int8).astype(np.float32) * scale
        dtype = torch.float8_e4m3fn if codes == "fp8" else torch.int8
        kept = scales if shape is None else scales.reshape(shape)
        return Packed(
            {"weight": torch.from_numpy(stored).view(dtype), suffix: torch.from_numpy(kept.copy())}, restored
        )

    return pack


def groups(
    matrix: Array, width: int, *, zeros: bool, scale: npt.DTypeLike
) -> tuple[Array, Array, Array, Array]:
    """Codes 0 to 15 [N, K], zeros and scales [N, groups], and what they stand for."""
    width = width or matrix.shape[1]
    count = matrix.shape[1] // width
    parts = matrix.reshape(matrix.shape[0], count, width)
    if zeros:
        low, high = parts.min(-1), parts.max(-1)
        scales = ((high - low) / 15).astype(scale)
        middle = np.clip(np.round(-low / scales.astype(np.float32)), 1, 15)
    else:
        scales = (np.abs(parts).max(-1) / 7).astype(scale)
        middle = np.full(scales.shape, 8.0)
    wide = scales.astype(np.float32)[..., None]
    codes = np.clip(np.round(parts / wide) + middle[..., None], 0, 15)
    restored = ((codes - middle[..., None]).astype(np.float32) * wide).reshape(matrix.shape)
    return codes.reshape(matrix.shape).astype(np.int64), middle.astype(np.int64), scales, restored


def words(values: Array, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """values [A, B] of four bits → [A, ceil(B / 8)] int32, whose place i from the lowest bits has value
    order[i]."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 8))).reshape(values.shape[0], -1, 8)
    total = np.zeros(padded.shape[:2], np.uint32)
    for place, which in enumerate(order):
        total |= padded[..., which].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(total.view(np.int32))


def unpacked(matrix: Array) -> Packed:
    return Packed({"weight": torch.from_numpy(matrix)}, matrix)


def pack_quantized(width: int, *, zeros: bool) -> Packer:
    def pack(matrix: Array) -> Packed:
        codes, middle, scales, restored = groups(matrix, width, zeros=zeros, scale=np.float32)
        tensors = {
            "weight_packed": words(codes),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(matrix.shape),
        }
        if zeros:
            tensors["weight_zero_point"] = words(middle.T).t()
        return Packed(tensors, restored)

    return pack


def gptq(width: int, *, zeros: bool, less: int) -> Packer:
    """`less`: by how much stored zeros are less than those that are meant."""

    def pack(matrix: Array) -> Packed:
        codes, middle, scales, restored = groups(matrix, width, zeros=zeros, scale=np.float16)
        tensors = {
            "qweight": words(codes).t(),
            "qzeros": words(middle.T - less),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.arange(matrix.shape[1], dtype=torch.int32) // (width or matrix.shape[1]),
        }
        return Packed(tensors, restored)

    return pack


def awq(width: int) -> Packer:
    def pack(matrix: Array) -> Packed:
        codes, middle, scales, restored = groups(matrix, width, zeros=True, scale=np.float16)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": words(codes.T, order),
            "qzeros": words(middle.T, order),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return Packed(tensors, restored)

    return pack


def compressed(form: str, *, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "quantization_status": "compressed",
    }


def _fp8(strategy: str, **more: Any) -> dict[str, Any]:
    return compressed("float-quantized", num_bits=8, type="float", strategy=strategy, symmetric=True, **more)


def _int4(**more: Any) -> dict[str, Any]:
    return compressed("pack-quantized", num_bits=4, type="int", **more)


def _gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True, **more}


_BLOCK = [32, 48]
_MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
_INT8 = compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True)
_MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "attention": {
            **_INT8["config_groups"]["group_0"],
            "format": "int-quantized",
            "targets": ["re:.*self_attn.*"],
        },
        "rest": {
            **_int4(strategy="group", group_size=16)["config_groups"]["group_0"],
            "format": "pack-quantized",
        },
    },
    "ignore": ["lm_head", "re:.*down_proj"],
}  # fmt: skip

TENSOR_FP8 = Format("fp8 by tensor", _fp8("tensor"), {"": scaled("fp8", 0, 0, shape=())})
CHANNEL_FP8 = Format("fp8 by channel", _fp8("channel"), {"": scaled("fp8", 1, 0)})
PACKED_INT4 = Format(
    "int4 packed",
    _int4(strategy="group", group_size=16, symmetric=True),
    {"": pack_quantized(16, zeros=False)},
)
GPTQ = Format("gptq", _gptq(), {"": gptq(16, zeros=False, less=1)})
AWQ = Format(
    "awq",
    {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
    {"": awq(16)},
)
FORMATS = [
    TENSOR_FP8,
    CHANNEL_FP8,
    Format(
        "fp8 by block", _fp8("block", block_structure=_BLOCK), {"": scaled("fp8", _BLOCK[0], _BLOCK[1])}
    ),
    Format("int8 by channel", _INT8, {"": scaled("int8", 1, 0)}),
    PACKED_INT4,
    Format(
        "int4 packed with zeros",
        _int4(strategy="group", group_size=16, symmetric=False),
        {"": pack_quantized(16, zeros=True)},
    ),
    Format("int4 packed by channel", _int4(strategy="channel"), {"": pack_quantized(0, zeros=False)}),
    Format(
        "fp8 with inverse scales",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": _BLOCK},
        {"": scaled("fp8", _BLOCK[0], _BLOCK[1], "weight_scale_inv")},
    ),
    Format(
        "fp8 with exceptions",
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["layers.0.mlp", "k_proj"]},
        {"1.mlp.gate_proj": scaled("fp8", 0, 0, shape=(1,)), "1.mlp.up_proj": scaled("fp8", 0, 0, shape=()),
         "1.mlp.down_proj": scaled("fp8", 0, 0, shape=()), "o_proj": scaled("fp8", 0, 0, shape=()),
         "q_proj": scaled("fp8", 0, 0, shape=()), "v_proj": scaled("fp8", 0, 0, shape=())},
    ),
    Format(
        "fbgemm", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, {"": scaled("fp8", 1, 0)}
    ),
    Format(
        "modelopt",
        {"quant_method": "modelopt", **_MODELOPT, "ignore": ["model.layers.1.*"]},
        {"model.layers.1": unpacked, "": scaled("fp8", 0, 0, shape=())},
    ),
    Format(
        "modelopt beside",
        {},
        {"": scaled("fp8", 0, 0, shape=())},
        {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": _MODELOPT}},
    ),
    GPTQ,
    Format("gptq v2", _gptq(checkpoint_format="gptq_v2"), {"": gptq(16, zeros=False, less=0)}),
    Format("gptq that lies", _gptq(checkpoint_format="gptq"), {"": gptq(16, zeros=False, less=0)}),
    Format("gptq with zeros", _gptq(sym=False), {"": gptq(16, zeros=True, less=1)}),
    Format(
        "gptq v2 with zeros",
        _gptq(sym=False, checkpoint_format="gptq_v2", group_size=-1),
        {"": gptq(0, zeros=True, less=0)},
    ),
    AWQ,
    Format(
        "mixed",
        _MIXED,
        {"down_proj": unpacked,
         "gate_proj": pack_quantized(16, zeros=False), "up_proj": pack_quantized(16, zeros=False),
         "": scaled("int8", 1, 0)},
    ),
]  # fmt: skip
