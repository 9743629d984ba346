"""A model's weights on a device: loaded from safetensors, or drawn from a seed. Both give what `Model`
takes, by the names of published checkpoints (`model.layers.0.self_attn.q_proj.weight`)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from baton.engine.kernels.reference.philox import philox, seed_key
from baton.engine.model.config import ModelConfig
from baton.engine.model.safetensors_file import StoredTensor, stored_tensors
from baton.engine.model.tensors import TensorSpec, tensor_specs
from baton.engine.model.weight_reader import Progress, read_tensors
from baton.errors import BatonError, ErrorKind
from baton.model_files import ConfigFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Old checkpoints hold rope tables as tensors; they follow from the configuration.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_PURPOSE_WEIGHTS = 1
_RANDOM_CHUNK = 1 << 22
# Of each tensor, for its checkpoint's digest.
_SAMPLE_RUNS = 16
_SAMPLE_BYTES = 64


def _ignore_progress(done: int, total: int) -> None:
    pass


def weight_places(config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Uninitialised memory for every tensor. Those of one pack lie one behind another, so that `packed`
    needs no copy: a model is in memory once, from the first byte on."""
    packs: dict[str, list[TensorSpec]] = {}
    specs = tensor_specs(config)
    for spec in specs:
        packs.setdefault(spec.key, []).append(spec)
    places: dict[str, Tensor] = {}
    for parts in packs.values():
        rows = [part.shape[0] for part in parts]
        shape = (sum(rows), *parts[0].shape[1:])
        whole = torch.empty(shape, device=device, dtype=_dtype_of(parts[0], dtype))
        places.update(zip((part.name for part in parts), torch.split(whole, rows), strict=True))
    return {spec.name: places[spec.name] for spec in specs}


def packed(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors as its layers take them: those of one pack as one tensor, by its name, without a copy
    where they lie as `weight_places` lays them; all others by their own names."""
    packs: dict[str, list[Tensor]] = {}
    for spec in tensor_specs(config):
        packs.setdefault(spec.key, []).append(weights[spec.name])
    return {name: parts[0] if len(parts) == 1 else joined(parts) for name, parts in packs.items()}


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
) -> dict[str, Tensor]:
    """Reads the folder's safetensors, one file or several with an index, and casts them on the device.

    All headers are checked before memory is taken, and the host holds no more of the data than a few small
    buffers. `progress` is called with bytes read and bytes in all. Raises BatonError(INVALID) for a file
    that is missing or broken and for a tensor that is missing, of another shape, or unknown.
    """
    stored = _stored(config, Path(folder))
    places = weight_places(config, device, dtype)
    read_tensors(stored, places, torch.device(device), progress)
    for spec in tensor_specs(config):
        if spec.order is not None:
            place = places[spec.name]
            place.copy_(place[torch.tensor(spec.order, device=place.device)])
    return places


def random_weights(
    config: ModelConfig,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress = _ignore_progress,
) -> dict[str, Tensor]:
    """Weights as a function of configuration, seed and tensor name alone: the same on every device.

    Norms are 1, biases small; matrices are uniform with a gain at which greedy text varies rather than loops.
    `progress` is called with bytes drawn and bytes in all.
    """
    weights = weight_places(config, device, dtype)
    done, total = 0, sum(weight.nbytes for weight in weights.values())
    for spec in tensor_specs(config):
        weight = weights[spec.name]
        if spec.constant is not None:
            weight.fill_(spec.constant)
        else:
            spread = 0.1 if len(spec.shape) == 1 else 2.0 / math.sqrt(spec.shape[1])
            _draw_uniform(weight.view(-1), spec.name, seed, math.sqrt(3) * spread)
        if weight.is_cuda:
            torch.cuda.synchronize(weight.device)
        done += weight.nbytes
        progress(done, total)
    return weights


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all tensors."""
    return sum(math.prod(spec.shape) * _dtype_of(spec, dtype).itemsize for spec in tensor_specs(config))


def checkpoint_digest(config: ModelConfig, folder: str | Path) -> bytes:
    """SHA-256 of a checkpoint as it is stored, whatever it is cast to and however it is cut into files.

    Covers the configuration, and of each tensor its name, dtype, shape and a sample of its bytes: reading all
    of a large model again would cost its start-up seconds. Raises BatonError(INVALID) as `load_weights` does.
    """
    digest = hashlib.sha256(config.digest())
    with contextlib.ExitStack() as stack:
        files: dict[Path, BinaryIO] = {}
        for stored in sorted(_stored(config, Path(folder)), key=lambda tensor: tensor.name):
            if stored.path not in files:
                files[stored.path] = stack.enter_context(stored.path.open("rb"))
            digest.update(f"{stored.name} {stored.dtype} {stored.shape}\0".encode())
            digest.update(_sample(stored, files[stored.path]))
    return digest.digest()


def random_digest(config: ModelConfig, seed: int) -> bytes:
    """`checkpoint_digest` of the weights that `random_weights` draws."""
    return hashlib.sha256(config.digest() + f"random {seed}".encode()).digest()


def _sample(stored: StoredTensor, file: BinaryIO) -> bytes:
    """Short runs of a tensor's bytes, at equal distances; all of them where they are few."""
    if stored.nbytes <= _SAMPLE_RUNS * _SAMPLE_BYTES:
        starts, length = [0], stored.nbytes
    else:
        last = stored.nbytes - _SAMPLE_BYTES
        starts, length = [last * run // (_SAMPLE_RUNS - 1) for run in range(_SAMPLE_RUNS)], _SAMPLE_BYTES
    return b"".join(os.pread(file.fileno(), length, stored.offset + start) for start in starts)


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise BatonError(ErrorKind.INVALID, f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}")
    index = ConfigFile.read(folder / INDEX_FILE)
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise index.error("weight_map", "expected an object of tensor names and files")
    names = sorted({str(name) for name in shards.values()})
    for name in names:
        if Path(name).name != name:
            raise index.error("weight_map", f"{json.dumps(name)} is not a file of this folder")
        if not (folder / name).is_file():
            raise BatonError(ErrorKind.INVALID, f"{folder / name}: no such file (named in {INDEX_FILE})")
    return [folder / name for name in names]


def _stored(config: ModelConfig, folder: Path) -> list[StoredTensor]:
    """Where the folder's files keep the model's tensors, file by file."""
    shapes = {spec.name: spec.shape for spec in tensor_specs(config)}
    ignored = (*_IGNORED_SUFFIXES, "lm_head.weight") if config.tied_head else _IGNORED_SUFFIXES
    found: dict[str, StoredTensor] = {}
    files = _files(folder)
    for path in files:
        for tensor in stored_tensors(path, ignored):
            if tensor.name not in shapes:
                raise tensor.error("is not part of the configured model")
            if tensor.shape != shapes[tensor.name]:
                raise tensor.error(f"has shape {list(tensor.shape)}, expected {list(shapes[tensor.name])}")
            if tensor.name in found:
                raise tensor.error(f"is in {found[tensor.name].path.name} as well")
            found[tensor.name] = tensor
    missing = sorted(shapes.keys() - found.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        where = files[0] if len(files) == 1 else folder
        raise BatonError(ErrorKind.INVALID, f"{where}: no tensor {missing[0]}{more} in the safetensors")
    return list(found.values())


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
