"""A model's weights on a device: loaded from safetensors, or drawn from a seed. Both give what `Model`
takes, by the names of published checkpoints (`model.layers.0.self_attn.q_proj.weight`)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
from baton.engine.kernels.reference.philox import philox, seed_key
from baton.engine.model.checkpoint import names_read, read_headers
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.layers.tensor_spec import TensorSpec
from baton.engine.model.quantization.unpack import UnpackError, unpack
from baton.engine.model.safetensors_file import StoredTensor
from baton.engine.model.tensors import HEAD, tensor_specs
from baton.engine.model.weight_formats import stored_format
from baton.engine.model.weight_places import UNQUANTIZED, Formats, RankPlaces, dtype_of
from baton.engine.model.weight_reader import Progress, Target, Targets, read_tensors

_PURPOSE_WEIGHTS = 1
_RANDOM_CHUNK = 1 << 22
# Tensors as stored that are on the device at once, beside the model, to be unpacked or quantised.
_UNPACKED_BYTES = 1 << 30


def _ignore_progress(done: int, total: int) -> None:
    pass


def packed(config: ModelConfig, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """A model's tensors as its layers take them: those of one pack as one tensor, by its name, without a copy
    where they lie as `weight_places` lays them; all others by their own names."""
    packs: dict[str, list[Weight]] = {}
    for spec in tensor_specs(config, own_head=HEAD in weights):
        packs.setdefault(spec.key, []).append(weights[spec.name])
    return {name: parts[0] if len(parts) == 1 else _one(parts) for name, parts in packs.items()}


def _one(parts: Sequence[Weight]) -> Weight:
    """All parts, of one format, as one matrix, as `joined` joins their tensors."""
    first = parts[0]
    if isinstance(first, Tensor):
        return joined([part for part in parts if isinstance(part, Tensor)])
    codes = [part.tensors() for part in parts if isinstance(part, QuantizedWeight)]
    return QuantizedWeight(first.format, first.columns, *map(joined, zip(*codes, strict=True)))


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
    """Loads like `load_ranks`, a model that one device has whole."""
    return load_ranks(config, folder, [device], dtype, progress, formats)[0]


def load_ranks(
    config: ModelConfig,
    folder: str | Path,
    devices: Sequence[torch.device | str],
    dtype: torch.dtype,
    progress: Progress = _ignore_progress,
    formats: Formats = UNQUANTIZED,
) -> list[dict[str, Weight]]:
    """Reads the folder's safetensors, one file or several with an index, and casts them on the devices, each
    of which gets its part of the model.

    All headers are checked before memory is taken, every byte is read once, and the host holds no more of the
    data than a few small buffers. What is stored in fewer bits is unpacked on the first
    device, and dequantised where `formats` does not have it; what `formats` has besides is quantised.
    `progress` is called with bytes read and bytes in all. Raises BatonError(INVALID) for a file that is
    missing or broken and for a tensor that is missing, of another shape, of another dtype, or unknown.
    """
    headers, device = read_headers(config, Path(folder)), torch.device(devices[0])
    ranks = RankPlaces(config, devices, dtype, formats)
    total, done = sum(tensor.nbytes for tensor in headers.values()), 0

    def read(tensors: Sequence[StoredTensor], into: Targets) -> None:
        nonlocal done
        read_tensors(tensors, into, device, lambda bytes_done, _: progress(done + bytes_done, total))
        done += sum(tensor.nbytes for tensor in tensors)

    direct: dict[str, list[Target]] = {}
    converted: list[TensorSpec] = []
    for spec in tensor_specs(config):
        if spec.key not in formats and stored_format(config, spec) is None:
            direct[spec.name] = ranks.targets(spec)
        else:
            converted.append(spec)
    read([headers[name] for name in headers if name in direct], direct)
    for specs in _batches(config, converted, headers):
        names = {name for spec in specs for name in names_read(config, spec).values() if name in headers}
        tensors = [header for name, header in headers.items() if name in names]
        raw = {one.name: torch.empty(one.shape, dtype=one.dtype, device=device) for one in tensors}
        read(tensors, {name: [Target.whole(tensor)] for name, tensor in raw.items()})
        for spec in specs:
            _convert(config, spec, ranks, raw, headers)
    progress(total, total)
    ranks.put_rows_in_order(direct)
    ranks.copy_tied_head()
    return ranks.places


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
    ranks: RankPlaces,
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
    try:
        ranks.put(spec, weight, as_stored=True)
    except ValueError as error:
        raise headers[names["weight"]].error(str(error)) from None


def random_weights(
    config: ModelConfig,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress = _ignore_progress,
    formats: Formats = UNQUANTIZED,
) -> dict[str, Weight]:
    """Draws like `random_ranks`, a model that one device has whole."""
    return random_ranks(config, seed, [device], dtype, progress, formats)[0]


def random_ranks(
    config: ModelConfig,
    seed: int,
    devices: Sequence[torch.device | str],
    dtype: torch.dtype,
    progress: Progress = _ignore_progress,
    formats: Formats = UNQUANTIZED,
) -> list[dict[str, Weight]]:
    """Weights as a function of configuration, seed and tensor name alone: the same on every device. Each of
    several devices gets its part of the model.

    Norms are 1, biases small; matrices are uniform with a gain at which greedy text varies rather than loops,
    and then quantised where `formats` has them. `progress` is called with bytes drawn and bytes in all.
    """
    ranks = RankPlaces(config, devices, dtype, formats)
    done, total = 0, sum(weight.nbytes for places in ranks.places for weight in places.values())
    for spec in tensor_specs(config):
        places = [place for place, *_ in ranks.parts(spec)]
        if len(devices) == 1 and isinstance(places[0], Tensor):
            _draw(places[0], spec, seed)
        else:
            drawn = torch.empty(spec.shape, device=devices[0], dtype=dtype_of(spec, dtype))
            _draw(drawn, spec, seed)
            ranks.put(spec, drawn, as_stored=False)
        for place in places:
            if place.device.type == "cuda":
                torch.cuda.synchronize(place.device)
        done += sum(place.nbytes for place in places)
        progress(done, total)
    ranks.copy_tied_head()
    return ranks.places


def _draw(weight: Tensor, spec: TensorSpec, seed: int) -> None:
    if spec.constant is not None:
        weight.fill_(spec.constant)
    else:
        spread = 0.1 if len(spec.shape) == 1 else spec.gain / math.sqrt(spec.shape[1])
        _draw_uniform(weight.view(-1), spec.name, seed, math.sqrt(3) * spread)


def weight_bytes(config: ModelConfig, dtype: torch.dtype, formats: Formats = UNQUANTIZED) -> int:
    """Bytes of all tensors of a model in these formats."""
    total = 0
    packs: dict[str, tuple[int, int]] = {}
    for spec in tensor_specs(config, own_head=HEAD in formats):
        if spec.key in formats:
            rows, columns = spec.shape
            packs[spec.key] = packs.get(spec.key, (0, 0))[0] + rows, columns
        else:
            total += math.prod(spec.shape) * dtype_of(spec, dtype).itemsize
    return total + sum(formats[key].nbytes(*shape) for key, shape in packs.items())


def random_digest(config: ModelConfig, seed: int) -> bytes:
    """Returns the `checkpoint_digest` of the weights that `random_weights` draws."""
    return hashlib.sha256(config.digest() + f"random {seed}".encode()).digest()


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
