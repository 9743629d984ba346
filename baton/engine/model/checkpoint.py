"""A checkpoint's folder: which tensors of a model its safetensors have, and where.

A matrix in fewer bits is several tensors; `stored_parts` lists them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from baton.base.errors import BatonError, ErrorKind
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.layers.tensor_spec import TensorSpec
from baton.engine.model.quantization.scheme import stored_parts
from baton.engine.model.safetensors_file import FLOATS, StoredTensor, stored_tensors
from baton.engine.model.tensors import tensor_specs
from baton.engine.model.weight_formats import stored_format
from baton.model_spec.model_files import ConfigFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Old checkpoints hold rope tables as tensors; they follow from the configuration.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
# Tensors of quantised checkpoints that are not used: the engine quantises queries, keys and values by its own
# scales.
_IGNORED_SCALES = tuple(
    f".{name}" for name in ("k_scale", "v_scale", "q_scale", "prob_scale", "output_scale")
)
# What is sampled of each tensor for its checkpoint's digest.
_SAMPLE_RUNS = 16
_SAMPLE_BYTES = 64


def checkpoint_digest(config: ModelConfig, folder: str | Path) -> bytes:
    """SHA-256 of a checkpoint as it is stored, whatever it is cast to and however it is cut into files.

    Covers the configuration, and of each tensor its name, dtype, shape and a sample of its bytes: reading all
    of a large model again would cost its start-up seconds. Raises BatonError(INVALID) as `load_weights` does.
    """
    digest = hashlib.sha256(config.digest())
    with contextlib.ExitStack() as stack:
        files: dict[Path, BinaryIO] = {}
        for stored in sorted(read_headers(config, Path(folder)).values(), key=lambda tensor: tensor.name):
            if stored.path not in files:
                files[stored.path] = stack.enter_context(stored.path.open("rb"))
            digest.update(f"{stored.name} {stored.dtype} {stored.shape}\0".encode())
            digest.update(_sample(stored, files[stored.path]))
    return digest.digest()


def read_headers(config: ModelConfig, folder: Path) -> dict[str, StoredTensor]:
    """Finds the model's tensors in the folder's files, by name and file by file; those that are checked and
    not read among them."""
    expected = {one.name: one for spec in tensor_specs(config) for one in _expected(config, spec)}
    ignored: tuple[str, ...] = _IGNORED_SUFFIXES
    if config.tied_head:
        ignored += ("lm_head.weight",)
    if config.quantization is not None:
        ignored += _IGNORED_SCALES
    found: dict[str, StoredTensor] = {}
    files = _files(folder)
    for path in files:
        for tensor in stored_tensors(path, ignored):
            if tensor.name not in expected:
                raise tensor.error("is not part of the configured model")
            expected[tensor.name].check(tensor)
            if tensor.name in found:
                raise tensor.error(f"is in {found[tensor.name].path.name} as well")
            found[tensor.name] = tensor
    for name, one in expected.items():
        if name in found and one.substitute in found:
            raise found[name].error(f"is stored beside {one.substitute}, of which one is expected")
    missing = sorted(
        name
        for name, one in expected.items()
        if not one.optional and not {name, one.substitute} & found.keys()
    )
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        where = files[0] if len(files) == 1 else folder
        raise BatonError(ErrorKind.INVALID, f"{where}: no tensor {missing[0]}{more} in the safetensors")
    return found


def names_read(config: ModelConfig, spec: TensorSpec) -> dict[str, str]:
    """The stored tensors that a tensor of the model is made of: their names by suffix, `weight` for one that
    is stored as it is."""
    return {one.suffix: one.name for one in _expected(config, spec) if one.read}


@dataclass(frozen=True, slots=True)
class _Expected:
    """A tensor that a checkpoint has, as `StoredPart` describes it."""

    name: str
    suffix: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    optional: bool
    read: bool
    substitute: str | None = None

    def check(self, tensor: StoredTensor) -> None:
        """Raises BatonError(INVALID) for a tensor of another dtype or shape."""
        if tensor.kind not in self.dtypes:
            raise tensor.error(f"is stored as {tensor.kind}, expected {' or '.join(self.dtypes)}")
        if tensor.shape not in self.shapes:
            shapes = " or ".join(str(list(shape)) for shape in self.shapes)
            raise tensor.error(f"has shape {list(tensor.shape)}, expected {shapes}")


def _expected(config: ModelConfig, spec: TensorSpec) -> list[_Expected]:
    stored = stored_format(config, spec)
    if stored is None:
        return [_Expected(spec.name, "weight", tuple(FLOATS), (spec.shape,), optional=False, read=True)]
    module = spec.name.removesuffix("weight")
    return [
        _Expected(
            module + part.suffix,
            part.suffix,
            part.dtypes,
            part.shapes,
            part.optional,
            part.read,
            None if part.substitute is None else module + part.substitute,
        )
        for part in stored_parts(stored, *spec.shape)
    ]


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
