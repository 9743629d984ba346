"""The layout of a KV cache in memory: cache groups, their planes, and the fingerprint of both.

A block holds `block_tokens` tokens of one cache group, as one contiguous object in the order
`[layer][plane][kv head][token][dim]`. A quantised cache has a plane of scales behind the codes of each layer:
two for each token and head, K's and V's. Two workers may exchange blocks if and only if their fingerprints
agree. Torch-free: engine and kvtransfer share it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

# What weights and activations may be; a cache also FP8.
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
FP8 = "float8_e4m3fn"
# The dtype of a quantised cache's scales: the range of float32, in two bytes.
SCALE_DTYPE = "bfloat16"
_CACHE_BYTES = {**DTYPE_BYTES, FP8: 1}
# What a fingerprint says of the split: blocks are exchanged whole, however many devices their worker has.
_WHOLE = b"0/1"
# A layer with planes of several dtypes ends at a multiple of this many bytes.
_ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a layer's cache, such as K, V or their scales: shape `(heads, dim)` a token."""

    name: str
    dtype: str
    heads: int
    dim: int

    @property
    def token_bytes(self) -> int:
        return self.heads * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one head of one token."""
        return self.dim * _CACHE_BYTES[self.dtype]


def key_value_planes(dtype: str, heads: int, dim: int) -> tuple[Plane, ...]:
    """The planes "k" and "v" of a cache of `dtype`; for FP8 also that of their scales."""
    planes = tuple(Plane(name, dtype, heads, dim) for name in ("k", "v"))
    if dtype != FP8:
        return planes
    return *planes, Plane("scales", SCALE_DTYPE, heads, len(planes))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of equal shape and lifetime; `window` is their sliding window in tokens, if any."""

    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    block_tokens: int
    window: int | None = None

    @property
    def values(self) -> Plane:
        """The shape of the planes that hold K and V; all of them have one."""
        return self.planes[0]

    @property
    def quantised(self) -> bool:
        """True if K and V are codes, and the last plane holds their scales."""
        return self.values.dtype == FP8

    @property
    def block_bytes(self) -> int:
        return len(self.layers) * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a block. With scales it ends, after padding, at a whole number of rows of
        codes, so that all rows of all blocks are equally far apart."""
        used = self.block_tokens * sum(plane.token_bytes for plane in self.planes)
        step = math.lcm(self.values.row_bytes, _ALIGNED_BYTES) if self.quantised else 1
        return -(-used // step) * step

    def plane_offsets(self) -> Iterator[tuple[Plane, int]]:
        """Each plane, and the byte of a layer at which it begins."""
        offset = 0
        for plane in self.planes:
            yield plane, offset
            offset += self.block_tokens * plane.token_bytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Layout:
    """All cache groups of a worker, or of one of its devices."""

    groups: tuple[CacheGroup, ...]

    @property
    def cache_dtype(self) -> str:
        """The dtype of K and V."""
        return ",".join(sorted({group.values.dtype for group in self.groups}))

    def fingerprint(self, model: bytes) -> bytes:
        """SHA-256 over length-prefixed fields: what must agree before any byte is exchanged.

        `model` is a digest of everything that makes the cache's contents (configuration, weights' identity).
        """
        digest = hashlib.sha256()
        for field in self._fields(model):
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
        return digest.digest()

    def _fields(self, model: bytes) -> list[bytes]:
        fields = [model, _WHOLE]
        for group in self.groups:
            fields.append(f"group {group.layers} {group.block_tokens} {group.window}".encode())
            fields += [f"plane {p.name} {p.dtype} {p.heads} {p.dim}".encode() for p in group.planes]
        return fields
