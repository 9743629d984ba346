"""Reads and checks a safetensors file's header, which says where its tensors are, and no byte of data.

The format: 8 bytes, little-endian, the header's length; the header, a JSON object of names with `dtype`,
`shape` and `data_offsets` [begin, end) counted from the header's end; then the data.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.base.errors import BatonError, ErrorKind

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# Beyond these no product of a shape could be written down in a message.
_MOST_DIMENSIONS, _MOST_SIZE = 8, 1 << 63
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CODES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_DTYPES = {**FLOATS, **_CODES}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: `offset` is its first byte's, from the file's start."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def kind(self) -> str:
        """The dtype as the format spells it."""
        return next(name for name, dtype in _DTYPES.items() if dtype is self.dtype)

    def error(self, text: str) -> BatonError:
        return _refusal(self.path, self.name, text)


def stored_tensors(path: Path, ignored_suffixes: tuple[str, ...] = ()) -> list[StoredTensor]:
    """All tensors of the file but those ignored, in the order of their bytes.

    Raises BatonError(INVALID) naming the file, and the tensor where it is one's fault: for what is no header,
    a dtype that is not served, a size that is not its shape's, bytes beyond the file's end.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            start = _LENGTH_BYTES + length
            if start > size or length > _MAX_HEADER_BYTES:
                raise BatonError(ErrorKind.INVALID, f"{path}: no safetensors file, or its header is cut off")
            header = json.loads(file.read(length))
    except OSError as error:
        raise BatonError(ErrorKind.INVALID, f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise BatonError(ErrorKind.INVALID, f"{path}: its header is not JSON") from None
    if not isinstance(header, dict):
        raise BatonError(ErrorKind.INVALID, f"{path}: its header is not an object")
    found = [
        _stored(path, name, entry, start, size)
        for name, entry in header.items()
        if name != "__metadata__" and not name.endswith(ignored_suffixes)
    ]
    return sorted(found, key=lambda tensor: tensor.offset)


def _stored(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:  # noqa: ANN401 (JSON)
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sizes = len(shape) <= _MOST_DIMENSIONS and all(map(_is_size, (*shape, begin, end)))
        whole = isinstance(kind, str) and sizes
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise _refusal(path, name, "has no dtype, shape and data_offsets")
    if kind not in _DTYPES:
        raise _refusal(path, name, f"is stored as {_line(kind)}, which is not served")
    tensor = StoredTensor(path, name, _DTYPES[kind], shape, start + begin)
    if end - begin != tensor.nbytes:
        raise tensor.error(f"has {end - begin} bytes, its shape {list(shape)} {tensor.nbytes}")
    if start + end > size:
        raise tensor.error(f"ends at byte {start + end}, the file at {size}: it is cut off")
    return tensor


def _is_size(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < _MOST_SIZE


def _refusal(path: Path, name: str, text: str) -> BatonError:
    return BatonError(ErrorKind.INVALID, f"{path}: tensor {_line(name)} {text}")


def _line(text: str) -> str:
    """A file's own text as part of a line."""
    return text if text.isprintable() else json.dumps(text)
