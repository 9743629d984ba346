"""Configurations of fp8 weights beside compressed-tensors: `fp8` by tensor or block, `fbgemm_fp8` by row,
NVIDIA ModelOpt's by tensor. Activations are quantised row by row whatever they say. Torch-free."""

from __future__ import annotations

from baton.engine.kernels.weight_format import WeightFormat
from baton.engine.model.quantization.compressed_tensors import read_block, read_names
from baton.engine.model.quantization.scheme import Rule, Scheme, StoredFormat
from baton.model_spec.model_files import ConfigFile

_ALL = ("Linear",)
# Not quantised, whatever the lists of exceptions say.
_HEAD = ("lm_head",)


def read_fp8(section: ConfigFile) -> Scheme:
    """`quant_method` fp8: scales by tensor, as vLLM (`weight_scale`) or `transformers` (`weight_scale_inv`)
    calls them, or with `weight_block_size` by block."""
    if (kind := section.text("fmt", "e4m3")) != "e4m3":
        raise section.error("fmt", f"only e4m3 is supported, got {kind!r}")
    if (kind := section.text("scale_fmt", "float")) == "ue8m0":
        raise section.error("scale_fmt", "scales that are powers of two (ue8m0) are not supported")
    if section.get("weight_block_size") is None:
        stored = StoredFormat("scaled-either", WeightFormat("fp8"))
    else:
        rows, columns = read_block(section, "weight_block_size")
        stored = StoredFormat("scaled-inverse", WeightFormat("fp8", rows, columns))
    ignored = (*read_names(section, "modules_to_not_convert"), *read_names(section, "ignored_layers"))
    return Scheme("fp8", (Rule(_ALL, stored),), (*_HEAD, *ignored), "parts")


def read_fbgemm_fp8(section: ConfigFile) -> Scheme:
    """`quant_method` fbgemm_fp8: a scale a row."""
    rule = Rule(_ALL, StoredFormat("scaled", WeightFormat("fp8")))
    return Scheme("fbgemm_fp8", (rule,), (*_HEAD, *read_names(section, "modules_to_not_convert")), "parts")


def read_modelopt(section: ConfigFile) -> Scheme:
    """`quant_method` modelopt: `quant_algo` FP8, a scale a tensor; scales of keys and values are not used."""
    if (algorithm := section.text("quant_algo")) != "FP8":
        raise section.error("quant_algo", f"only FP8 is supported, got {algorithm!r}")
    ignored = (*read_names(section, "ignore"), *read_names(section, "exclude_modules"))
    rule = Rule(_ALL, StoredFormat("scaled", WeightFormat("fp8")))
    return Scheme("modelopt", (rule,), (*_HEAD, *ignored), "wildcards")
