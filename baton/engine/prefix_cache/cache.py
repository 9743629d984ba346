"""The prefix cache of a worker: computed blocks on the device, and a store of evicted ones behind it.
Torch-free.

    taken ─▶ the longest prefix that is on the device, by reference ─▶ what the store has behind that, copied
             into the sequence's own blocks ─▶ the rest is computed
    computed ─▶ each block that became full is cached by its hash: other sequences may share it from now on
    reserved ─▶ at a decode worker: blocks on the device are shared, the rest is transferred
    evicted ─▶ kept by the store, where there is one with room; else lost

Blocks are identified by their hashes (`baton.model_spec.block_hash`). At least one token of a prompt is
always computed, since its logits are needed. A hit needs the blocks of all cache groups, those with a sliding
window included: blocks behind a window are not freed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Run
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Protocol

from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.blocks import BlockTables, OutOfBlocksError
from baton.engine.memory.cached_blocks import Entry
from baton.engine.sequence import Sequence
from baton.model_spec.block_hash import BlockHasher

DEVICE = "device"
# The longest time for which a prompt waits for blocks that are being read from disk; then they are computed.
DISK_WAIT_S = 0.25


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that a store has in each tier; blocks dropped since the disk was too slow or not in use; corrupt
    files; reads and writes that the disk failed; whether it is not in use since it fails."""

    host_blocks: int = 0
    disk_blocks: int = 0
    disk_dropped: int = 0
    disk_corrupt: int = 0
    disk_failed: int = 0
    disk_off: bool = False


class BlockStore(Protocol):
    """Keeps the contents of evicted blocks by their hashes, as many as it has room for."""

    def __contains__(self, block_hash: bytes) -> bool:
        """True if the block can be loaded, at once or after it was read from disk."""

    def hashes(self) -> set[bytes]:
        """The hashes of all blocks that can be loaded."""

    def put(self, entries: list[Entry]) -> None:
        """Copies as many blocks as it has room for; the blocks may be overwritten when this returns."""

    def ready(self, hashes: Run[bytes]) -> tuple[int, bool]:
        """Returns how many of the first `hashes` can be loaded now, and whether more are being read."""

    @property
    def seconds_each(self) -> float:
        """Recent average seconds to read a block from disk; 0 before one was read."""

    def load(self, hashes: Run[bytes], tables: BlockTables) -> list[str]:
        """Copies blocks that are ready into those of `tables`; returns the tier that each came from."""

    def poll(self) -> bool:
        """Collects finished reads and writes; False where there were none."""

    def take_lost(self) -> list[bytes]:
        """The hashes of blocks that the store lost since the last call, in `put` or `poll`."""

    @property
    def stored(self) -> Stored:
        """Counts of stored blocks for metrics."""

    def close(self) -> None:
        """Stops the store's background threads."""


class PrefixCache:
    """The prefix cache of one engine. Not thread-safe: all calls come from the engine's loop."""

    def __init__(
        self,
        pools: BlockPools,
        hasher_of: Callable[[str], BlockHasher],
        store: BlockStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hasher_of`: the block hasher of a tenant, by its name."""
        self._pools = pools
        self._cached = pools.cached
        self._hasher_of = hasher_of
        self._store = store
        self._clock = clock
        # Block hash → whether this worker has it, in any tier: changes that were not published yet.
        self._changes: dict[bytes, bool] = {}
        self.hit_tokens = 0
        self.missed_tokens = 0
        self.hit_blocks: Counter[str] = Counter()
        self._cached.add_eviction_listener(self._evicted)

    def hashes(self) -> set[bytes]:
        """The hashes of all blocks that this worker has, in any tier."""
        return set(self._cached.entries) | (self._store.hashes() if self._store is not None else set())

    @property
    def stored(self) -> Stored:
        """Counts of the store behind the device."""
        return Stored() if self._store is None else self._store.stored

    def poll(self) -> bool:
        """Does a bounded amount of the store's work; False where there was none."""
        if self._store is None:
            return False
        worked = self._store.poll()
        self._note_lost(self._store)
        return worked

    def close(self) -> None:
        """Closes the block store. To be called once, at shutdown."""
        if self._store is not None:
            self._store.close()

    def take_prefix(self, sequence: Sequence, computed_s: float = math.inf) -> bool:
        """Gives a sequence all of its blocks, the first of them with cached contents. False where it should
        wait: blocks are being read from disk, in less time than the `computed_s` seconds that computing each
        takes."""
        wanted = self._wanted(sequence)
        held = self._held(wanted)
        if not self._is_ready(sequence, wanted[held:], computed_s):
            return False
        prefix = self._acquire(wanted[:held])
        try:
            sequence.blocks = self._with_rest(sequence, prefix)
        except OutOfBlocksError:
            self._pools.release(prefix)
            return False
        loaded = self._load(wanted[held:], sequence.blocks, held)
        self.hit_blocks[DEVICE] += held
        sequence.hashed_blocks = held
        self._count(sequence, held + loaded)
        return True

    def computed(self, sequence: Sequence) -> None:
        """Caches the blocks of a sequence that have become full."""
        full = min(len(sequence.hashes), sequence.computed // self._pools.layout.groups[0].block_tokens)
        if sequence.blocks is not None and full > sequence.hashed_blocks:
            tables = tuple(table[sequence.hashed_blocks : full] for table in sequence.blocks)
            self.add(sequence.hashes[sequence.hashed_blocks : full], tables)
            sequence.hashed_blocks = full

    def allocate(self, hashes: Run[bytes], tokens: int) -> tuple[BlockTables, int]:
        """Allocates blocks for `tokens` tokens, the first of which are shared ones with the first of
        `hashes`, not to be written; returns them and the number shared. Raises OutOfBlocksError, taking
        none."""
        held = self._held(hashes)
        prefix = self._acquire(hashes[:held])
        try:
            more = self._pools.allocate_more(prefix, tokens)
        except OutOfBlocksError:
            self._pools.release(prefix)
            raise
        self.hit_blocks[DEVICE] += held
        return tuple(mine + new for mine, new in zip(prefix, more, strict=True)), held

    def hashes_of(self, token_ids: Run[int], tenant: str = "", known: Run[bytes] = ()) -> tuple[bytes, ...]:
        """The hashes of the full blocks of `token_ids`; `known`: those of the first blocks, if known
        already."""
        return self._hasher_of(tenant).hashes(token_ids, known)

    def add(self, hashes: Run[bytes], tables: BlockTables) -> None:
        """Caches the first blocks of `tables`, whose contents are final, by `hashes`. A block whose hash is
        cached already is skipped."""
        for block_hash, *blocks in zip(hashes, *tables, strict=False):
            if self._cached.add(block_hash, tuple(blocks)):
                self._changes[block_hash] = True

    def _held(self, hashes: Run[bytes]) -> int:
        """Number of the first `hashes` that are on the device."""
        return sum(1 for _ in takewhile(self._cached.__contains__, hashes))

    def _acquire(self, hashes: Run[bytes]) -> BlockTables:
        hits = [self._cached.acquire(block_hash) for block_hash in hashes]
        return tuple(zip(*hits, strict=True)) if hits else tuple(() for _ in self._pools.pools)

    def take_changes(self, limit: int) -> tuple[list[bytes], list[bytes]]:
        """Hashes of blocks added and of blocks lost since the last call, at most `limit` together."""
        part = dict(islice(self._changes.items(), limit))
        for block_hash in part:
            del self._changes[block_hash]
        came = [block_hash for block_hash, here in part.items() if here]
        return came, [block_hash for block_hash, here in part.items() if not here]

    def _wanted(self, sequence: Sequence) -> Run[bytes]:
        """The hashes to look for. None where prompt logprobs are requested, which need all rows to be
        computed."""
        if sequence.prompt_logprobs or (sequence.borrowed and sequence.lend is None):
            return ()
        usable = (sequence.length - 1) // self._pools.layout.groups[0].block_tokens
        return sequence.hashes[:usable]

    def _is_ready(self, sequence: Sequence, hashes: Run[bytes], computed_s: float) -> bool:
        """True if the prompt should start without waiting for reads. Reads that are not waited for go on, for
        later prompts."""
        if self._store is None or not hashes:
            return True
        _, coming = self._store.ready(hashes)
        if not coming or self._store.seconds_each > computed_s:
            return True
        if sequence.disk_wait_ends is None:
            sequence.disk_wait_ends = self._clock() + DISK_WAIT_S
        return self._clock() >= sequence.disk_wait_ends

    def _with_rest(self, sequence: Sequence, prefix: BlockTables) -> BlockTables:
        """All blocks of a sequence, beginning with those of `prefix`. Raises OutOfBlocksError."""
        if sequence.blocks is None:
            more = self._pools.allocate_more(prefix, sequence.length)
            return tuple(mine + new for mine, new in zip(prefix, more, strict=True))
        if sequence.lend is None or not prefix[0]:
            return sequence.blocks
        return sequence.lend(prefix)

    def _load(self, hashes: Run[bytes], tables: BlockTables, start: int) -> int:
        """Loads blocks from index `start` on from the store and caches them; returns how many."""
        if self._store is None or not hashes:
            return 0
        count, _ = self._store.ready(hashes)  # making room for these blocks may have evicted some of them
        if count:
            filled = tuple(table[start : start + count] for table in tables)
            self.hit_blocks.update(self._store.load(hashes[:count], filled))
            self.add(hashes[:count], filled)
        return count

    def _count(self, sequence: Sequence, blocks: int) -> None:
        tokens = blocks * self._pools.layout.groups[0].block_tokens
        sequence.computed = sequence.cached = tokens
        if not (sequence.prompt_logprobs or sequence.canary):
            self.hit_tokens += tokens
            self.missed_tokens += sequence.length - tokens

    def _evicted(self, entries: list[Entry]) -> None:
        if self._store is not None:
            self._store.put(entries)
            self._note_lost(self._store)
        for block_hash, _ in entries:
            stored = self._store is not None and block_hash in self._store
            if not stored or block_hash in self._changes:  # it may have been lost, and put again
                self._changes[block_hash] = stored

    def _note_lost(self, store: BlockStore) -> None:
        self._changes |= {one: False for one in store.take_lost() if one not in self._cached}
