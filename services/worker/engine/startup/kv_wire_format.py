"""The format of KV blocks on a wire that goes through the host: as in the cache, or quantised to eight bits
an element with a scale for each token and head (`kvtransfer.device.quantise`).

A quantised block is a run of rows, each the codes of one head and then its scale in float32. So a piece of
whole rows can be read and written independently of the rest.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

from baton.base.errors import BatonError, ErrorKind
from baton.engine.memory.kv_cache import BlockMemory
from kvtransfer.device.quantise import EightBit, quantise, restore
from services.common.config.transfer import KVWire

_KINDS: dict[KVWire, EightBit] = {"fp8": EightBit.E4M3, "int8": EightBit.INT8}
_SCALE_BYTES = 4


class WireBlocks:
    """Blocks on the wire as in the cache. `block_bytes`: bytes of a block, by cache group. `fingerprint`:
    digest of the format, equal where two workers may send each other blocks."""

    def __init__(self, cache: BlockMemory, fingerprint: bytes) -> None:
        self.block_bytes = tuple(group.block_bytes for group in cache.layout.groups)
        self.fingerprint = fingerprint
        self._cache = cache

    def piece_bytes(self, most: int) -> int:
        """The largest piece size up to `most` bytes that splits no row."""
        return most

    def read(self, group: int, block: int, offset: int, length: int) -> memoryview:
        """Bytes of a block in wire format, on the host. `offset` and `length` must not split a row."""
        return self._cache.read_block(group, block, offset, length)

    def write(self, group: int, block: int, offset: int, data: memoryview) -> None:
        """Writes what `read` returned into a block; complete when it returns."""
        self._cache.write_block(group, block, offset, data)


class EightBitBlocks(WireBlocks):
    """Blocks quantised to eight bits: a little more than a quarter of the bytes of float32, half of 16
    bits."""

    def __init__(self, cache: BlockMemory, fingerprint: bytes, kind: KVWire) -> None:
        """Raises BatonError(INVALID) for a cache whose elements are not of 16 or 32 bits."""
        super().__init__(cache, hashlib.sha256(fingerprint + kind.encode()).digest())
        groups = cache.layout.groups
        self._dtypes: list[torch.dtype] = [getattr(torch, group.values.dtype) for group in groups]
        wide = next((dtype for dtype in self._dtypes if dtype.itemsize not in (2, 4)), None)
        if wide is not None:
            raise BatonError(ErrorKind.INVALID, f"kv_wire {kind} is for KV of 16 or 32 bits, not for {wide}")
        self._kind = _KINDS[kind]
        self._dims = [group.values.dim for group in groups]
        self._row_bytes = [dim + _SCALE_BYTES for dim in self._dims]
        rows = [group.block_bytes // group.values.row_bytes for group in groups]
        self.block_bytes = tuple(map(int.__mul__, rows, self._row_bytes))

    def piece_bytes(self, most: int) -> int:
        """Raises BatonError(INVALID) where `most` bytes do not hold a whole row of each cache group."""
        step = math.lcm(*self._row_bytes)
        if most < step:
            raise BatonError(ErrorKind.INVALID, f"pieces of {most} bytes hold no whole rows: {step} at least")
        return most // step * step

    def read(self, group: int, block: int, offset: int, length: int) -> memoryview:
        place = self._place(group, offset, length)
        rows = self._cache.block(group, block)[place].view(self._dtypes[group])
        codes, scales = quantise(rows.view(-1, self._dims[group]), self._kind)
        wire = torch.cat([codes, scales.view(torch.uint8).view(-1, _SCALE_BYTES)], dim=1)
        return wire.view(-1).cpu().numpy().data

    def write(self, group: int, block: int, offset: int, data: memoryview) -> None:
        place = self._place(group, offset, len(data))
        wire = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).to(self._cache.device)
        wire = wire.view(-1, self._row_bytes[group])
        codes, scales = wire[:, :-_SCALE_BYTES].contiguous(), wire[:, -_SCALE_BYTES:].contiguous()
        rows = restore(codes, scales.view(torch.float32).view(-1), self._kind, self._dtypes[group])
        self._cache.put(group, block, place.start, rows.view(-1).view(torch.uint8))

    def _place(self, group: int, offset: int, length: int) -> slice:
        """The bytes of a block in the cache that these bytes on the wire stand for."""
        size, wide = self._row_bytes[group], self._dims[group] * self._dtypes[group].itemsize
        if offset % size or length % size:
            raise ValueError(f"bytes {offset} to {offset + length} of a block split rows of {size}")
        return slice(offset // size * wide, (offset + length) // size * wide)


def wire_blocks(cache: BlockMemory, fingerprint: bytes, kind: KVWire) -> WireBlocks:
    """The wire format for a configuration's `kv_wire`. Raises BatonError(INVALID)."""
    return WireBlocks(cache, fingerprint) if kind == "native" else EightBitBlocks(cache, fingerprint, kind)
