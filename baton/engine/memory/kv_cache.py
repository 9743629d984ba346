"""The paged KV cache's memory: one tensor a cache group, block-major. Who owns what is not known here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.model_spec.layout import CacheGroup, Layout, Plane


class KVCache:
    """The blocks of every cache group, zeroed. All three are views of one memory, by cache group:

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
        views = [_views(group, pool) for group, pool in zip(layout.groups, self.storage, strict=True)]
        self.groups: list[Tensor] = [values for values, _ in views]
        self.scales: list[Tensor | None] = [scales for _, scales in views]

    def block_bytes_view(self, group: int, block: int) -> Tensor:
        """The block as a 1-D uint8 view of `block_bytes` bytes; writing to it writes the cache."""
        return self.storage[group][block]

    def read_block(self, group: int, block: int, offset: int, length: int) -> memoryview:
        """Bytes of a block on the host: a view of them on a CPU, a copy from any other device."""
        return self.block_bytes_view(group, block)[offset : offset + length].cpu().numpy().data

    def write_block(self, group: int, block: int, offset: int, data: memoryview) -> None:
        """Copies host bytes into a block; done when it returns."""
        place = self.block_bytes_view(group, block)[offset : offset + len(data)]
        source = np.frombuffer(data, dtype=np.uint8)
        if place.device.type == "cpu":
            place.numpy()[:] = source
        else:
            place.copy_(torch.from_numpy(source.copy()))


def _views(group: CacheGroup, storage: Tensor) -> tuple[Tensor, Tensor | None]:
    """`groups` and `scales` of one cache group. Raises ValueError where its planes have several shapes."""
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
