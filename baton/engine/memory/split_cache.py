"""The KV cache of a worker of several devices, each of which has the keys and values of its heads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from baton.device.heads.moves import WORD_BYTES, HeadMoves
from baton.device.peer_memory import enable_peer_access, refuse_other_allocators
from baton.engine.memory.kv_cache import BlockMemory, KVCache
from baton.engine.memory.move_queue import MoveQueue
from baton.model_spec.layout import Layout

# Whole blocks that are moved at once: as many as fit into so much memory of the first device, one at least.
_STAGING_BYTES = 32 << 20
_MOST_BLOCKS = 16


def staging_bytes(largest: int) -> int:
    """Bytes of the first device for staging, where the largest whole block has `largest`."""
    return largest * max(1, min(_MOST_BLOCKS, _STAGING_BYTES // largest))


class SplitKVCache(BlockMemory):
    """Blocks of the same numbers in the memory of each rank. Whole ones are gathered from, and scattered to,
    the ranks' heads, in staging on the first device; what pads a layer is zeros, so that their bytes do not
    depend on the split. `heads`: of each cache group."""

    def __init__(self, layout: Layout, ranks: Sequence[KVCache]) -> None:
        """Creates the cache of all ranks. `layout`: with all heads. ValueError where heads are not whole
        words. On GPUs raises BatonError(INVALID) where a pair has no peer access or torch allocates memory
        that no peer reaches, and compiles, which takes seconds."""
        self.layout = layout
        self._ranks = ranks
        self.device = ranks[0].device
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            refuse_other_allocators(os.environ)
            enable_peer_access([cache.device.index for cache in ranks])
            torch.cuda.set_device(self.device)
        self.heads = [
            HeadMoves(group, [cache.storage[number] for cache in ranks])
            for number, group in enumerate(layout.groups)
        ]
        largest = max(group.block_bytes for group in layout.groups)
        size = staging_bytes(largest)
        self._most = size // largest
        self._staging = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self._queue = MoveQueue(self.device, self._most)
        if on_gpu:
            from baton.device.heads.launch import warm_heads

            warm_heads(self.heads)

    @property
    def ranks(self) -> Sequence[KVCache]:
        return self._ranks

    def block(self, group: int, block: int) -> Tensor:
        return self._gathered(group, block, 0, self.heads[group].block_bytes)

    def put(self, group: int, block: int, offset: int, data: Tensor, *, non_blocking: bool = False) -> None:
        """Scatters the bytes; some around them may be read and written again."""
        heads = self.heads[group]
        words = heads.covering(offset, len(data))
        with self._queue.ordered():
            whole = self._staging[: len(words) * WORD_BYTES]
            if len(data) < len(whole):
                self._queue.move(heads, whole, (block,), words, gathers=True)
            first = offset - words.start * WORD_BYTES
            whole[first : first + len(data)].copy_(data, non_blocking=non_blocking)
            self._queue.move(heads, whole, (block,), words, gathers=False)
        if not non_blocking:
            self._queue.synchronize()

    def read_block(self, group: int, block: int, offset: int, length: int) -> memoryview:
        return self._gathered(group, block, offset, length).to("cpu", copy=True).numpy().data

    def save(self, group: int, blocks: Sequence[int], room: Tensor, places: Sequence[int]) -> None:
        with self._queue.ordered():
            for some, there, whole in self._batches(group, blocks, places):
                self._queue.move(self.heads[group], whole.view(-1), some, self._all(group), gathers=True)
                for place, row in zip(there, whole, strict=True):
                    room[place].copy_(row, non_blocking=True)

    def load(self, group: int, blocks: Sequence[int], room: Tensor, places: Sequence[int]) -> None:
        with self._queue.ordered():
            for some, there, whole in self._batches(group, blocks, places):
                for place, row in zip(there, whole, strict=True):
                    row.copy_(room[place], non_blocking=True)
                self._queue.move(self.heads[group], whole.view(-1), some, self._all(group), gathers=False)

    def _gathered(self, group: int, block: int, offset: int, length: int) -> Tensor:
        """Bytes of a block, uint8 [length], in staging."""
        words = self.heads[group].covering(offset, length)
        whole = self._staging[: len(words) * WORD_BYTES]
        with self._queue.ordered():
            self._queue.move(self.heads[group], whole, (block,), words, gathers=True)
        first = offset - words.start * WORD_BYTES
        return whole[first : first + length]

    def _batches(
        self, group: int, blocks: Sequence[int], places: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Sequence[int], Tensor]]:
        """Yields blocks and places that staging has room for, and its rows of them: uint8 [n, bytes]."""
        size = self.heads[group].block_bytes
        for first in range(0, len(blocks), self._most):
            some = blocks[first : first + self._most]
            whole = self._staging[: len(some) * size].view(len(some), size)
            yield some, places[first : first + self._most], whole

    def _all(self, group: int) -> range:
        return range(self.heads[group].words)
