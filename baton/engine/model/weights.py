"""A model's weights on a device: loaded from safetensors, or drawn from a seed. Both give what `Model`
takes, by the names of published checkpoints (`model.layers.0.self_attn.q_proj.weight`)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight, dense
from baton.engine.kernels.reference.philox import philox, seed_key
from baton.engine.kernels.weight_format import WeightFormat
from baton.engine.model.checkpoint import names_read, read_headers
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.layers.tensor_spec import TensorSpec
from baton.engine.model.quantization.quantize import quantize
from baton.engine.model.quantization.unpack import UnpackError, unpack
from baton.engine.model.safetensors_file import StoredTensor
from baton.engine.model.tensors import EMBEDDING, HEAD, tensor_specs
from baton.engine.model.weight_formats import stored_format
from baton.engine.model.weight_reader import Progress, read_tensors

_PURPOSE_WEIGHTS = 1
_RANDOM_CHUNK = 1 << 22
# Tensors as stored that are on the device at once, beside the model, to be unpacked or quantised.
_UNPACKED_BYTES = 1 << 30
# Elements of a matrix that are quantised at once, which takes a few float32 for each.
_QUANTIZED_ELEMENTS = 1 << 27

Formats = Mapping[str, WeightFormat]
"""The matrices in fewer bits, as `weight_formats` lists them."""
UNQUANTIZED: Formats = MappingProxyType({})


def _ignore_progress(done: int, total: int) -> None:
    pass


def weight_places(
    config: ModelConfig, device: torch.device | str, dtype: torch.dtype, formats: Formats = UNQUANTIZED
) -> dict[str, Weight]:
    """Uninitialised memory for every tensor. Those of one pack lie one behind another, so that `packed`
    needs no copy: a model is in memory once, from the first byte on."""
    packs: dict[str, list[TensorSpec]] = {}
    specs = tensor_specs(config, own_head=HEAD in formats)
    for spec in specs:
        packs.setdefault(spec.key, []).append(spec)
    places: dict[str, Weight] = {}
    for key, parts in packs.items():
        rows = [part.shape[0] for part in parts]
        views: Sequence[Weight]
        if key in formats:
            views = QuantizedWeight.empty(formats[key], sum(rows), parts[0].shape[1], device).split(rows)
        else:
            shape = (sum(rows), *parts[0].shape[1:])
            whole = torch.empty(shape, device=device, dtype=_dtype_of(parts[0], dtype))
            views = torch.split(whole, rows)
        places.update(zip((part.name for part in parts), views, strict=True))
    return {spec.name: places[spec.name] for spec in specs}


def packed(config: ModelConfig, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """A model's tensors as its layers take them: those of one pack as one tensor, by its name, without a copy
    where they lie as `weight_places` lays them; all others by their own names."""
    packs: dict[str, list[Weight]] = {}
    for spec in tensor_specs(config, own_head=HEAD in weights):
        packs.setdefault(spec.key, []).append(weights[spec.name])
    return {name: parts[0] if len(parts) == 1 else _one(parts) for name, parts in packs.items()}


def _one(parts: Sequence[Weight]) -> Weight:
    """All parts, of one format, as one matrix."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    codes = [part for part in parts if isinstance(part, QuantizedWeight)]
    return joined(tensors) if tensors else joined_codes(codes)


def joined_codes(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The rows of all parts, which are of one format, as `joined` joins them."""
    first = parts[0]
    tensors = [joined(tensors) for tensors in zip(*(part.tensors() for part in parts), strict=True)]
    return QuantizedWeight(first.format, first.columns, *tensors)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts in one tensor: the memory that they share where they are contiguous in it, else a
    copy."""
    first, rows = parts[0], 0
    memory, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if not part.is_contiguous() or (part.untyped_storage().data_ptr(), part.data_ptr()) != (memory, end):
            return torch.cat(list(parts))
        rows += part.shape[0]
        end += part.nbytes
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def load_weights(
    config: ModelConfig,
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress = _ignore_progress,
    formats: Formats = UNQUANTIZED,
) -> dict[str, Weight]:
    """Reads the folder's safetensors, one file or several with an index, and casts them on the device.

    All headers are checked before memory is taken, and the host holds no more of the data than a few small
    buffers. What is stored in fewer bits is unpacked on the device, and dequantised where `formats` does not
    have it; what `formats` has besides is quantised. `progress` is called with bytes read and bytes in all.
    Raises BatonError(INVALID) for a file that is missing or broken and for a tensor that is missing, of
    another shape, of another dtype, or unknown.
    """
    headers, device = read_headers(config, Path(folder)), torch.device(device)
    places = weight_places(config, device, dtype, formats)
    total, done = sum(tensor.nbytes for tensor in headers.values()), 0

    def read(tensors: Sequence[StoredTensor], into: Mapping[str, Tensor]) -> None:
        nonlocal done
        read_tensors(tensors, into, device, lambda bytes_done, _: progress(done + bytes_done, total))
        done += sum(tensor.nbytes for tensor in tensors)

    direct: dict[str, Tensor] = {}
    converted: list[TensorSpec] = []
    for spec in tensor_specs(config):
        place = places[spec.name]
        if isinstance(place, Tensor) and stored_format(config, spec) is None:
            direct[spec.name] = place
        else:
            converted.append(spec)
    read([headers[name] for name in headers if name in direct], direct)
    for specs in _batches(config, converted, headers):
        names = {name for spec in specs for name in names_read(config, spec).values() if name in headers}
        tensors = [header for name, header in headers.items() if name in names]
        raw = {one.name: torch.empty(one.shape, dtype=one.dtype, device=device) for one in tensors}
        read(tensors, raw)
        for spec in specs:
            _convert(config, spec, places[spec.name], raw, headers)
    progress(total, total)
    for spec in tensor_specs(config):
        if spec.order is not None and spec.name in direct:
            direct[spec.name].copy_(direct[spec.name][torch.tensor(spec.order, device=device)])
    _copy_tied_head(config, places)
    return places


def _batches(
    config: ModelConfig, specs: Sequence[TensorSpec], headers: Mapping[str, StoredTensor]
) -> Iterator[list[TensorSpec]]:
    """The tensors to be unpacked or quantised, those of a batch together as large as may be at once."""
    batch: list[TensorSpec] = []
    size = 0
    for spec in specs:
        needs = sum(headers[n].nbytes for n in names_read(config, spec).values() if n in headers)
        if batch and size + needs > _UNPACKED_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(spec)
        size += needs
    if batch:
        yield batch


def _convert(
    config: ModelConfig,
    spec: TensorSpec,
    place: Weight,
    raw: dict[str, Tensor],
    headers: Mapping[str, StoredTensor],
) -> None:
    """Unpacks or quantises a matrix from its stored tensors, which are taken out of `raw`."""
    names = {suffix: name for suffix, name in names_read(config, spec).items() if name in raw}
    parts = {suffix: raw.pop(name) for suffix, name in names.items()}
    stored, (rows, columns) = stored_format(config, spec), spec.shape
    weight: Weight
    try:
        weight = parts["weight"] if stored is None else unpack(stored, parts, rows, columns)
    except UnpackError as error:
        raise headers[names[error.suffix]].error(str(error)) from None
    if spec.order is not None:
        order = torch.tensor(spec.order, device=weight.device)
        weight = weight.reordered(order) if isinstance(weight, QuantizedWeight) else weight[order]
    try:
        _put(place, weight)
    except ValueError as error:
        raise headers[names["weight"]].error(str(error)) from None


def _put(place: Weight, weight: Weight) -> None:
    """Copies a matrix to its place, quantised or dequantised as that is."""
    if isinstance(place, Tensor):
        place.copy_(dense(weight, place.dtype))
    elif isinstance(weight, Tensor):
        rows = max(1, _QUANTIZED_ELEMENTS // weight.shape[1]) * place.format.scale_rows
        parts = torch.split(weight, rows)
        for part, into in zip(parts, place.split([len(part) for part in parts]), strict=True):
            into.copy_(quantize(part, place.format))
    else:
        place.copy_(weight if weight.format == place.format else weight.with_row_scales())


def _copy_tied_head(config: ModelConfig, places: Mapping[str, Weight]) -> None:
    """Fills a tied head's own matrix, where there is one, from the embedding."""
    if config.tied_head and HEAD in places:
        _put(places[HEAD], places[EMBEDDING])


def random_weights(
    config: ModelConfig,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress = _ignore_progress,
    formats: Formats = UNQUANTIZED,
) -> dict[str, Weight]:
    """Weights as a function of configuration, seed and tensor name alone: the same on every device.

    Norms are 1, biases small; matrices are uniform with a gain at which greedy text varies rather than loops,
    and then quantised where `formats` has them. `progress` is called with bytes drawn and bytes in all.
    """
    weights = weight_places(config, device, dtype, formats)
    done, total = 0, sum(weight.nbytes for weight in weights.values())
    for spec in tensor_specs(config):
        place = weights[spec.name]
        if isinstance(place, Tensor):
            _draw(place, spec, seed)
        else:
            drawn = torch.empty(spec.shape, device=device, dtype=dtype)
            _draw(drawn, spec, seed)
            _put(place, drawn)
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
        done += place.nbytes
        progress(done, total)
    _copy_tied_head(config, weights)
    return weights


def _draw(weight: Tensor, spec: TensorSpec, seed: int) -> None:
    if spec.constant is not None:
        weight.fill_(spec.constant)
    else:
        spread = 0.1 if len(spec.shape) == 1 else 2.0 / math.sqrt(spec.shape[1])
        _draw_uniform(weight.view(-1), spec.name, seed, math.sqrt(3) * spread)


def weight_bytes(config: ModelConfig, dtype: torch.dtype, formats: Formats = UNQUANTIZED) -> int:
    """Bytes of all tensors."""
    total = 0
    packs: dict[str, tuple[int, int]] = {}
    for spec in tensor_specs(config, own_head=HEAD in formats):
        if spec.key in formats:
            rows, columns = spec.shape
            packs[spec.key] = packs.get(spec.key, (0, 0))[0] + rows, columns
        else:
            total += math.prod(spec.shape) * _dtype_of(spec, dtype).itemsize
    return total + sum(formats[key].nbytes(*shape) for key, shape in packs.items())


def random_digest(config: ModelConfig, seed: int) -> bytes:
    """`checkpoint_digest` of the weights that `random_weights` draws."""
    return hashlib.sha256(config.digest() + f"random {seed}".encode()).digest()


def _dtype_of(spec: TensorSpec, dtype: torch.dtype) -> torch.dtype:
    found: torch.dtype = dtype if spec.dtype is None else getattr(torch, spec.dtype)
    return found


def _draw_uniform(out: Tensor, name: str, seed: int, bound: float) -> None:
    """Uniform in (-bound, bound): no transcendental function, so every device gives the same bits."""
    size, device = out.numel(), out.device
    tag = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    wrapped = seed % (1 << 64)
    key = seed_key(torch.tensor(wrapped - (1 << 64) if wrapped >> 63 else wrapped, device=device))
    zero = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, size, _RANDOM_CHUNK):
        end = min(start + _RANDOM_CHUNK, size)
        quads = torch.arange(start // 4, -(-end // 4), device=device)
        words = philox((quads & 0xFFFFFFFF, quads >> 32, zero + _PURPOSE_WEIGHTS, zero + tag), key)
        units = (torch.stack(words, dim=-1).view(-1)[: end - start].double() + 0.5) * 2.0**-31 - 1
        out[start:end] = (units * bound).to(out.dtype)
