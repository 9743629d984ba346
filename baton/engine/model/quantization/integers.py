"""Configurations of GPTQ and AWQ: weights of 4 bits by groups of columns. Torch-free."""

from __future__ import annotations

from baton.engine.kernels.weight_format import WeightFormat
from baton.engine.model.quantization.compressed_tensors import read_names
from baton.engine.model.quantization.scheme import Rule, Scheme, StoredFormat
from baton.model_spec.model_files import ConfigFile

_ALL = ("Linear",)
_HEAD = ("lm_head",)
_BITS = 4


def read_gptq(section: ConfigFile) -> Scheme:
    """`quant_method` gptq, of its first and second version."""
    columns = _group(section, "bits")
    version = section.text("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise section.error("checkpoint_format", f"{version!r} is not supported")
    if section.get("dynamic"):
        raise section.error("dynamic", "rules by module are not supported")
    weight_format = WeightFormat("int4", scale_columns=columns, zeros=not section.flag("sym", True))
    stored = StoredFormat("gptq", weight_format, zeros_less_one=version == "gptq")
    ignored = () if section.flag("lm_head", False) else _HEAD
    names = (*ignored, *read_names(section, "modules_to_not_convert"))
    return Scheme("gptq", (Rule(_ALL, stored),), names, "parts")


def read_awq(section: ConfigFile) -> Scheme:
    """`quant_method` awq, as its version `gemm` stores it."""
    columns = _group(section, "bits" if section.has("bits") else "w_bit")
    version = section.text("version", "gemm").lower()
    if version != "gemm":
        raise section.error("version", f"only gemm is supported, got {version!r}")
    if not section.flag("zero_point", True):
        raise section.error("zero_point", "only true is supported")
    stored = StoredFormat("awq", WeightFormat("int4", scale_columns=columns, zeros=True))
    names = read_names(section, "modules_to_not_convert")
    return Scheme("awq", (Rule(_ALL, stored),), (*_HEAD, *names), "parts")


def _group(section: ConfigFile, bits_key: str) -> int:
    """Columns of a group; 0: all. Raises BatonError(INVALID) for other than 4 bits."""
    if (bits := section.positive(bits_key)) != _BITS:
        raise section.error(bits_key, f"only {_BITS} bits are supported, got {bits}")
    key = "group_size" if section.has("group_size") else "q_group_size"
    return 0 if section.get(key) == -1 else section.positive(key, 128)
