"""KV blocks in host memory, those of swapped-out sequences and cached ones; pinned where there is a GPU, so
that copies overlap with steps.

The caller owns the blocks of the cache: it must keep them until a copy has ended, and no step may write them
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType

import numpy as np
import torch

from baton.device.streams.cuda_stream import compute_stream
from baton.device.streams.stream import Event
from baton.engine.memory.blocks import BlockTables
from baton.engine.memory.kv_cache import BlockMemory

Saved = NewType("Saved", BlockTables)
"""Indices in host memory of one sequence's blocks, in token order, by cache group."""


class HostBlocks:
    """Room for as many blocks of every cache group as fit into `budget` bytes; all calls from one thread."""

    def __init__(self, cache: BlockMemory, budget: int) -> None:
        device = cache.device
        count = budget // sum(group.block_bytes for group in cache.layout.groups)
        on_gpu = device.type == "cuda"
        self._cache = cache
        self._stream = compute_stream(device)
        self._room = [
            torch.empty(count, group.block_bytes, dtype=torch.uint8, pin_memory=on_gpu and count > 0)
            for group in cache.layout.groups
        ]
        self._free = [_FreePlaces(count) for _ in self._room]

    @property
    def free(self) -> int:
        """Free blocks of the cache group that has the fewest."""
        return min(map(len, self._free))

    def fits(self, tables: BlockTables) -> bool:
        """True if there is room for these blocks."""
        return all(len(blocks) <= len(free) for blocks, free in zip(tables, self._free, strict=True))

    def save(self, tables: BlockTables) -> tuple[Saved, Event]:
        """Starts a copy of blocks of the cache to host memory, milliseconds at most; they must fit. The event
        completes with the copy."""
        places = tuple(
            tuple(free.pop() for _ in blocks) for blocks, free in zip(tables, self._free, strict=True)
        )
        return Saved(places), self._copy(places, tables, inward=False)

    def load(self, saved: Saved, tables: BlockTables) -> Event:
        """Starts a copy of saved blocks into the first blocks of `tables`, which may be more."""
        return self._copy(saved, tables, inward=True)

    def bytes_of(self, saved: Saved) -> bytes:
        """The bytes of saved blocks whose copy has ended: block by block, group by group."""
        pairs = zip(saved, self._room, strict=True)
        return b"".join(room[place].numpy().tobytes() for places, room in pairs for place in places)

    def save_bytes(self, data: bytes) -> Saved:
        """Stores the result of `bytes_of` for one block of every group; it must fit."""
        places, start = [], 0
        for free, room in zip(self._free, self._room, strict=True):
            place, size = free.pop(), room.shape[1]
            room[place].numpy()[:] = np.frombuffer(data, np.uint8, size, start)
            places.append((place,))
            start += size
        return Saved(tuple(places))

    def release(self, saved: Saved) -> None:
        """Frees the host memory of saved blocks."""
        for places, free in zip(saved, self._free, strict=True):
            free.extend(places)

    def _copy(self, places: BlockTables, tables: BlockTables, *, inward: bool) -> Event:
        with self._stream.activate():  # the copy is ordered after writes that were enqueued before
            for group, room in enumerate(self._room):
                copy = self._cache.load if inward else self._cache.save
                copy(group, tables[group][: len(places[group])], room, places[group])
            return self._stream.record_event()


class _FreePlaces:
    """The free indices below `count`. Those never taken are no list: of a small model's blocks there
    are hundreds of thousands, a list of which takes each start milliseconds and megabytes."""

    def __init__(self, count: int) -> None:
        self._untaken = range(count)
        self._returned: list[int] = []

    def __len__(self) -> int:
        return len(self._untaken) + len(self._returned)

    def pop(self) -> int:
        """Takes one; raises IndexError where none is free."""
        if self._returned:
            return self._returned.pop()
        place = self._untaken[-1]
        self._untaken = self._untaken[:-1]
        return place

    def extend(self, places: Iterable[int]) -> None:
        """Gives taken ones back."""
        self._returned.extend(places)
