"""Reads what a model's folder says about quantisation. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.model.quantization.compressed_tensors import read_compressed_tensors
from baton.engine.model.quantization.fp8 import read_fbgemm_fp8, read_fp8, read_modelopt
from baton.engine.model.quantization.integers import read_awq, read_gptq
from baton.engine.model.quantization.scheme import Scheme
from baton.model_spec.model_files import ConfigFile

_METHODS: dict[str, Callable[[ConfigFile], Scheme]] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm_fp8,
    "modelopt": read_modelopt,
    "gptq": read_gptq,
    "awq": read_awq,
}
_MODELOPT_FILE = "hf_quant_config.json"


def read_scheme(config: ConfigFile) -> Scheme | None:
    """Reads `quantization_config` of config.json, or the `quantization` of ModelOpt's own file beside it;
    None where the model is not quantised. Raises BatonError(INVALID) naming the key of what is not
    supported."""
    section = config.section("quantization_config")
    beside = config.path.with_name(_MODELOPT_FILE)
    if section is None and beside.is_file():
        found = ConfigFile.read(beside).section("quantization")
        return None if found is None else read_modelopt(found)
    if section is None:
        return None
    method = section.text("quant_method")
    if method not in _METHODS:
        supported = ", ".join(_METHODS)
        raise config.error(
            "quantization_config", f"quant_method {method} is not supported (supported: {supported})"
        )
    return _METHODS[method](section)
