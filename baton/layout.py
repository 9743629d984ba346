"""What a KV cache looks like in memory: cache groups, their planes, and the fingerprint of both.

A block holds `block_tokens` tokens of one cache group, as one contiguous object in the order
`[layer][plane][kv head][token][dim]`. Two workers may exchange blocks if and only if their
fingerprints agree. Torch-free: engine and kvtransfer share it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a layer's cache, such as K or V: shape `(heads, dim)` a token."""

    name: str
    dtype: str
    heads: int
    dim: int

    @property
    def token_bytes(self) -> int:
        return self.heads * self.dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of equal shape and lifetime; `window` is their sliding window in tokens, if any."""

    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    block_tokens: int
    window: int | None = None

    @property
    def block_bytes(self) -> int:
        return len(self.layers) * self.block_tokens * sum(plane.token_bytes for plane in self.planes)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Layout:
    """All cache groups of one rank."""

    groups: tuple[CacheGroup, ...]
    rank: int = 0
    rank_count: int = 1

    @property
    def cache_dtype(self) -> str:
        """The dtypes of all planes."""
        return ",".join(sorted({plane.dtype for group in self.groups for plane in group.planes}))

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
        fields = [model, f"{self.rank}/{self.rank_count}".encode()]
        for group in self.groups:
            fields.append(f"group {group.layers} {group.block_tokens} {group.window}".encode())
            fields += [f"plane {p.name} {p.dtype} {p.heads} {p.dim}".encode() for p in group.planes]
        return fields
