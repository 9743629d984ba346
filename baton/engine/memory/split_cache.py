"""The KV cache of a worker of several devices, each of which has the keys and values of its heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.memory.kv_cache import BlockMemory, KVCache, views_of
from baton.model_spec.layout import Layout
from baton.model_spec.split import splits


class SplitKVCache(BlockMemory):
    """Blocks of the same numbers in the memory of each rank. Whole ones are gathered from, and scattered to,
    the ranks' heads; what pads a layer is zeros, so that their bytes do not depend on the split."""

    def __init__(self, layout: Layout, ranks: Sequence[KVCache]) -> None:
        """Creates the cache of all ranks. `layout`: with all heads."""
        self.layout = layout
        self._ranks = ranks
        self.device = ranks[0].device
        self._heads = [
            [split.heads(group.values.heads) for group in layout.groups] for split in splits(len(ranks))
        ]

    @property
    def ranks(self) -> Sequence[KVCache]:
        return self._ranks

    def block(self, group: int, block: int) -> Tensor:
        """A copy of the block's bytes."""
        whole = torch.zeros(self.layout.groups[group].block_bytes, dtype=torch.uint8, device=self.device)
        for mine, theirs in self._pairs(group, block, whole):
            theirs.copy_(mine)
        return whole

    def put(self, group: int, block: int, offset: int, data: Tensor, *, non_blocking: bool = False) -> None:
        """Scatters the bytes; what a block has before and behind them is read and written again."""
        size = self.layout.groups[group].block_bytes
        if len(data) == size:
            whole = torch.empty(size, dtype=torch.uint8, device=self.device)
        else:
            whole = self.block(group, block)
        whole[offset : offset + len(data)].copy_(data, non_blocking=non_blocking)
        for mine, theirs in self._pairs(group, block, whole):
            mine.copy_(theirs)
        if self.device.type == "cuda":
            # A wait for the first device's stream includes the copies on the others.
            first = torch.cuda.current_stream(self.device)
            for cache in self.ranks[1:]:
                first.wait_stream(torch.cuda.current_stream(cache.device))
            if not non_blocking:
                first.synchronize()

    def _pairs(self, group: int, block: int, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each rank's codes or values, and scales, of a block beside those of its heads in a whole one, which
        is memory of its own."""
        pairs = []
        values, scales = views_of(self.layout.groups[group], whole.unsqueeze(0))
        for cache, heads in zip(self.ranks, self._heads, strict=True):
            mine = slice(heads[group].start, heads[group].stop)
            pairs.append((cache.groups[group][block], values[0, :, :, mine]))
            own_scales = cache.scales[group]
            if own_scales is not None and scales is not None:
                pairs.append((own_scales[block], scales[0, :, mine]))
        return pairs
