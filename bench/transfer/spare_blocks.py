"""Unused blocks of a decode engine's KV cache, into which transfers go while it decodes."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.engine.memory.kv_cache import KVCache


class SpareBlocks:
    """Blocks for `sets` transfers of `blocks` blocks each, in random order; a set keeps its contents until
    all others have been used again."""

    def __init__(self, cache: KVCache, spare: tuple[int, ...], blocks: int) -> None:
        """`spare`: unused blocks of the cache's only group. ValueError where it has several."""
        if len(cache.groups) != 1:
            raise ValueError(f"a cache of {len(cache.groups)} groups")
        places = random.Random(1).sample(spare, len(spare))
        self._cache = cache
        self._free = deque(places[at : at + blocks] for at in range(0, len(places), blocks))
        self._places: dict[int, list[int]] = {}
        self._last: list[int] = []
        # The last complete transfer.
        self.last = 0

    def take(self, transfer: int) -> None:
        """Assigns the least recently used set to a transfer."""
        self._places[transfer] = self._free.popleft()

    def give_back(self, transfer: int, *, whole: bool) -> None:
        """Returns the set of a transfer that has ended; `whole`: with all its bytes."""
        places = self._places.pop(transfer)
        self._free.append(places)
        if whole:
            self.last, self._last = transfer, places

    def place(self, transfer_id: int, group: int, ordinal: int) -> int:
        return self._places[transfer_id][ordinal]

    def scatter(self, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview) -> None:
        self._cache.write_block(group, self.place(transfer_id, group, ordinal), offset, data)

    def digest(self) -> str:
        """The digest of all bytes of `last`."""
        size = self._cache.layout.groups[0].block_bytes
        found = hashlib.sha256()
        for place in self._last:
            found.update(self._cache.read_block(0, place, 0, size))
        return found.hexdigest()
