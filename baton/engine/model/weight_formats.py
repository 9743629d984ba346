"""Decides which of a model's matrices the checkpoint and the engine keep in fewer bits, and how.
Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from baton.base.errors import BatonError, ErrorKind
from baton.engine.kernels.weight_format import FORMATS, WeightFormat
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.layers.tensor_spec import TensorSpec
from baton.engine.model.quantization.scheme import StoredFormat
from baton.engine.model.tensors import EMBEDDING, HEAD, in_layers, tensor_specs

_WEIGHT = ".weight"


def stored_format(config: ModelConfig, spec: TensorSpec) -> StoredFormat | None:
    """Format in which the checkpoint stores a tensor in fewer bits; None: it is not quantised."""
    if config.quantization is None or len(spec.shape) != 2 or spec.name == EMBEDDING or spec.keeps_dtype:
        return None
    return config.quantization.stored(spec.name.removesuffix(_WEIGHT))


def weight_formats(
    config: ModelConfig, quantization: str | None = None, *, quantize_head: bool = False
) -> dict[str, WeightFormat]:
    """The format of each matrix in fewer bits by the name under which a model finds it (`TensorSpec.key`).

    `quantization`: one of FORMATS, for the layers' matrices of a checkpoint that is not quantised, and with
    `quantize_head` for the head; one that is tied to the embedding gets a matrix of its own.
    Projections that the engine multiplies as one matrix, but that are stored differently, are kept at full
    width. Raises BatonError(INVALID) for a quantised checkpoint with `quantization`, and for experts in int8.
    """
    if config.experts is not None and quantization == "int8":
        raise _int8_experts("quantization int8")
    if config.quantization is not None and quantization is not None:
        raise BatonError(
            ErrorKind.INVALID,
            f"quantization {quantization} is for checkpoints that are not quantised, and this one is "
            f"({config.quantization.method})",
        )
    packs: dict[str, list[TensorSpec]] = {}
    for spec in tensor_specs(config):
        packs.setdefault(spec.key, []).append(spec)
    formats: dict[str, WeightFormat] = {}
    if quantize_head and quantization is not None:
        formats[HEAD] = FORMATS[quantization]
    for key, parts in packs.items():
        if quantization is not None and in_layers(parts[0]) and not parts[0].keeps_dtype:
            formats[key] = FORMATS[quantization]
            continue
        if key in formats:
            continue
        stored = [stored_format(config, part) for part in parts]
        found = {one.format for one in stored if one is not None}
        if parts[0].expert is not None and any(one.codes == "int8" for one in found):
            raise _int8_experts(f"quantization_config: {key} in int8")
        if None not in stored and len(found) == 1:
            formats[key] = _pack_format(found.pop(), parts)
    return formats


def format_name(formats: dict[str, WeightFormat], dtype: str) -> str:
    """A model's weights in a word: `dtype` where none is in fewer bits, else the names of the formats, with
    `+head` where the head is among them."""
    names = ",".join(sorted({one.name for one in formats.values()}))
    return (f"{names}+head" if HEAD in formats else names) or dtype


def _int8_experts(what: str) -> BatonError:
    text = f"{what} is not supported for mixtures of experts (supported: fp8, int4)"
    return BatonError(ErrorKind.INVALID, text)


def _pack_format(part_format: WeightFormat, parts: Sequence[TensorSpec]) -> WeightFormat:
    """A matrix packed of parts: a scale a row where parts do not end with a block of a scale."""
    whole = all(part.shape[0] % part_format.scale_rows == 0 and part.order is None for part in parts)
    return part_format if whole or (len(parts) == 1 and parts[0].order is None) else part_format.by_row()
