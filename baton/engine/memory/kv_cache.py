"""The paged KV cache's memory: one tensor a cache group, block-major. Who owns what is not known here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.layout import CacheGroup, Layout


class KVCache:
    """`groups[i]` is [blocks, layers, planes, kv heads, block tokens, dim], contiguous and zeroed.

    So one block is one run of bytes, which is what a handoff ships. Block 0 is scratch: padding rows
    write there, and no sequence owns it.
    """

    def __init__(self, layout: Layout, num_blocks: int | Sequence[int], device: torch.device | str) -> None:
        """`num_blocks` counts block 0; a sequence gives one number for each group."""
        counts = [num_blocks] * len(layout.groups) if isinstance(num_blocks, int) else list(num_blocks)
        if len(counts) != len(layout.groups):
            raise ValueError(f"{len(counts)} block counts for {len(layout.groups)} cache groups")
        self.layout = layout
        self.groups: list[Tensor] = [
            _allocate(group, count, torch.device(device))
            for group, count in zip(layout.groups, counts, strict=True)
        ]

    def block_bytes_view(self, group: int, block: int) -> Tensor:
        """The block as a 1-D uint8 view of `block_bytes` bytes; writing to it writes the cache."""
        return self.groups[group][block].view(-1).view(torch.uint8)

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


def _allocate(group: CacheGroup, blocks: int, device: torch.device) -> Tensor:
    plane = group.planes[0]
    if any((p.dtype, p.heads, p.dim) != (plane.dtype, plane.heads, plane.dim) for p in group.planes):
        raise ValueError("the planes of a cache group must have one shape and dtype")
    shape = (blocks, len(group.layers), len(group.planes), plane.heads, group.block_tokens, plane.dim)
    return torch.zeros(shape, dtype=getattr(torch, plane.dtype), device=device)
