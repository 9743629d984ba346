"""Cached blocks: full, computed blocks by the hash of their contents. Torch-free.

    in use ──add──▶ in use, cached ──last reference released──▶ idle ──evicted──▶ free
                        ▲──────────────── acquire ───────────────┘

An entry is one block of every cache group: a prefix is only of use where all layers have it. It is evicted
only while none of its blocks has a reference; the one that was used longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from baton.engine.memory.blocks import BlockPool

Entry = tuple[bytes, tuple[int, ...]]
"""A hash and its blocks, one a cache group."""


class CachedBlocks:
    """The block pools of a worker, and the cached blocks in them. Not thread-safe: all calls come from the
    engine's loop."""

    def __init__(self, num_blocks: Sequence[int]) -> None:
        """`num_blocks`: the number of blocks of each pool."""
        self.pools = tuple(
            BlockPool(count, partial(self._became_idle, group)) for group, count in enumerate(num_blocks)
        )
        # By hash: its blocks, one a cache group. Read-only to callers.
        self.entries: dict[bytes, tuple[int, ...]] = {}
        self._hashes: tuple[dict[int, bytes], ...] = tuple({} for _ in num_blocks)
        # Least recently used first.
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._eviction_listeners: list[Callable[[list[Entry]], None]] = []
        self.evicted = 0

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def idle(self) -> int:
        """Entries that could be evicted now; each gives every pool a block."""
        return len(self._idle)

    def add(self, block_hash: bytes, blocks: tuple[int, ...]) -> bool:
        """Caches blocks in use whose contents are final; False where the hash or one of the blocks is cached
        already."""
        if block_hash in self.entries or any(
            block in hashes for block, hashes in zip(blocks, self._hashes, strict=True)
        ):
            return False
        self.entries[block_hash] = blocks
        for pool, hashes, block in zip(self.pools, self._hashes, blocks, strict=True):
            pool.keep(block)
            hashes[block] = block_hash
        return True

    def acquire(self, block_hash: bytes) -> tuple[int, ...]:
        """Takes one more reference of each block of an entry."""
        blocks = self.entries[block_hash]
        for pool, block in zip(self.pools, blocks, strict=True):
            pool.retain_kept(block)
        self._idle.pop(block_hash, None)
        return blocks

    def add_eviction_listener(self, listener: Callable[[list[Entry]], None]) -> None:
        """Calls `listener` with all evicted entries from now on, before their blocks are free."""
        self._eviction_listeners.append(listener)

    def evict_for(self, counts: Sequence[int]) -> None:
        """Evicts until every pool has `counts` free blocks; there must be enough idle ones."""
        lacking = max(count - pool.free for count, pool in zip(counts, self.pools, strict=True))
        if lacking <= 0:
            return
        victims = [self._forget(self._idle.popitem(last=False)[0]) for _ in range(lacking)]
        self.evicted += lacking
        for listener in self._eviction_listeners:
            listener(victims)
        for _, blocks in victims:
            for pool, block in zip(self.pools, blocks, strict=True):
                pool.free_kept(block)

    def check_integrity(self) -> None:
        """Raises RuntimeError where entries, hashes and idle ones contradict each other or the pools."""
        for block_hash, blocks in self.entries.items():
            held = [pool.references(block) for pool, block in zip(self.pools, blocks, strict=True)]
            if (block_hash in self._idle) != (not any(held)):
                raise RuntimeError(f"cached blocks {blocks} with {held} references are wrongly idle or not")
            if any(hashes.get(n) != block_hash for hashes, n in zip(self._hashes, blocks, strict=True)):
                raise RuntimeError(f"cached blocks {blocks} have another hash")
        if any(len(hashes) != len(self.entries) for hashes in self._hashes) or self.idle > len(self):
            raise RuntimeError("a block has a hash that is not cached")
        if any(pool.kept != set(hashes) for pool, hashes in zip(self.pools, self._hashes, strict=True)):
            raise RuntimeError("a pool keeps other blocks than those that are cached")

    def _became_idle(self, group: int, block: int) -> None:
        block_hash = self._hashes[group][block]
        blocks = self.entries[block_hash]
        if not any(pool.references(block) for pool, block in zip(self.pools, blocks, strict=True)):
            self._idle[block_hash] = None

    def _forget(self, block_hash: bytes) -> Entry:
        blocks = self.entries.pop(block_hash)
        for hashes, block in zip(self._hashes, blocks, strict=True):
            del hashes[block]
        return block_hash, blocks
