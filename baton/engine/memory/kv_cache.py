"""The paged KV cache's memory: one tensor a cache group, block-major. Who owns what is not known here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.model_spec.layout import CacheGroup, Layout, Plane


class BlockMemory(ABC):
    """The memory of a worker's KV blocks, in bytes as one device would have them: what a handoff, the prefix
    cache's tiers and sequences that are swapped out take and bring. `layout`: with all heads; `device`: the
    first one."""

    layout: Layout
    device: torch.device

    @property
    @abstractmethod
    def ranks(self) -> Sequence[KVCache]:
        """The memory of each device."""

    @abstractmethod
    def block(self, group: int, block: int) -> Tensor:
        """The block's bytes, uint8 [block bytes] on `device`: a view of the memory, or a copy, which the next
        call may overwrite."""

    @abstractmethod
    def put(self, group: int, block: int, offset: int, data: Tensor, *, non_blocking: bool = False) -> None:
        """Copies `data`, uint8 on any device, into a block from its byte `offset` on. `non_blocking`: `data`
        stays as it is until the stream's work has ended."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks on all devices."""
        return sum(pool.nbytes for cache in self.ranks for pool in cache.storage)

    def save(self, group: int, blocks: Sequence[int], room: Tensor, places: Sequence[int]) -> None:
        """Enqueues copies of blocks to the rows `places` of `room`, uint8 [n, block bytes] in host memory, on
        torch's current stream."""
        for place, block in zip(places, blocks, strict=True):
            room[place].copy_(self.block(group, block), non_blocking=True)

    def load(self, group: int, blocks: Sequence[int], room: Tensor, places: Sequence[int]) -> None:
        """Enqueues copies of rows of `room` to blocks; the arguments are those of `save`."""
        for place, block in zip(places, blocks, strict=True):
            self.put(group, block, 0, room[place], non_blocking=True)

    def read_block(self, group: int, block: int, offset: int, length: int) -> memoryview:
        """Bytes of a block on the host: a view of them or a copy."""
        return self.block(group, block)[offset : offset + length].cpu().numpy().data

    def write_block(self, group: int, block: int, offset: int, data: memoryview) -> None:
        """Copies host bytes into a block; done when it returns."""
        source = np.frombuffer(data, dtype=np.uint8)
        self.put(group, block, offset, torch.from_numpy(source.copy()))


class KVCache(BlockMemory):
    """The blocks of every cache group on one device, zeroed; three views of one memory, by cache group:

    `storage[i]` uint8 [blocks, block bytes]: a block is one run of bytes, which is what a handoff ships.
    `groups[i]` [blocks, layers, planes, kv heads, block tokens, dim]: K and V, or their codes.
    `scales[i]` [blocks, layers, kv heads, block tokens, planes]: what codes are multiplied by, or None.

    Block 0 is scratch: padding rows write there, and no sequence owns it.
    """

    def __init__(self, layout: Layout, num_blocks: int | Sequence[int], device: torch.device | str) -> None:
        """`num_blocks` counts block 0; a sequence gives one number for each group."""
        counts = [num_blocks] * len(layout.groups) if isinstance(num_blocks, int) else list(num_blocks)
        if len(counts) != len(layout.groups):
            raise ValueError(f"{len(counts)} block counts for {len(layout.groups)} cache groups")
        self.layout = layout
        self.storage: list[Tensor] = [
            torch.zeros(count, group.block_bytes, dtype=torch.uint8, device=device)
            for group, count in zip(layout.groups, counts, strict=True)
        ]
        self.device = self.storage[0].device
        views = [views_of(group, pool) for group, pool in zip(layout.groups, self.storage, strict=True)]
        self.groups: list[Tensor] = [values for values, _ in views]
        self.scales: list[Tensor | None] = [scales for _, scales in views]

    @property
    def ranks(self) -> Sequence[KVCache]:
        """The cache itself: a stored reference would keep its memory until garbage is collected."""
        return (self,)

    def block(self, group: int, block: int) -> Tensor:
        """A view of the block's bytes; writing to it writes the cache."""
        return self.storage[group][block]

    def put(self, group: int, block: int, offset: int, data: Tensor, *, non_blocking: bool = False) -> None:
        self.block(group, block)[offset : offset + len(data)].copy_(data, non_blocking=non_blocking)

    def write_block(self, group: int, block: int, offset: int, data: memoryview) -> None:
        if self.device.type == "cpu":  # without a copy in between
            place = self.block(group, block)[offset : offset + len(data)]
            place.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        else:
            super().write_block(group, block, offset, data)


def views_of(group: CacheGroup, storage: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns `groups` and `scales` of one cache group. Raises ValueError where its planes have several
    shapes."""
    planes = list(group.plane_offsets())
    if not group.quantised:
        return _view(group, storage, planes), None
    return _view(group, storage, planes[:-1]), _view(group, storage, planes[-1:])[:, :, 0]


def _view(group: CacheGroup, storage: Tensor, planes: Sequence[tuple[Plane, int]]) -> Tensor:
    """[blocks, layers, planes, heads, block tokens, dim] of planes that lie one behind another."""
    (plane, offset), *_ = planes
    if any((p.dtype, p.heads, p.dim) != (plane.dtype, plane.heads, plane.dim) for p, _ in planes):
        raise ValueError("the planes of a cache group must have one shape and dtype")
    dtype: torch.dtype = getattr(torch, plane.dtype)
    tokens, size = group.block_tokens, dtype.itemsize
    shape = (len(storage), len(group.layers), len(planes), plane.heads, tokens, plane.dim)
    head = tokens * plane.dim
    strides = (group.block_bytes // size, group.layer_bytes // size, plane.heads * head, head, plane.dim, 1)
    return storage.view(-1).view(dtype).as_strided(shape, strides, offset // size)
