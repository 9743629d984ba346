"""What a worker keeps of sequences: blocks on the device, a store behind them. Torch-free.

    claim ─▶ the longest prefix that is on the device, by reference ─▶ what the store has behind that, copied
             into blocks of the sequence's own ─▶ the rest is computed
    computed ─▶ each block that became full is named: others may take it over from now on
    reserved ─▶ the same where others compute: what is on the device is taken over, the rest is sent here
    evicted ─▶ the store has it, where there is one with room; else it is gone

At least one token of a prompt is always computed, for the logits behind it. Hits need the blocks of all cache
groups, those with a sliding window included: none of them is given up behind its window.
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

from baton.block_hash import BlockHasher
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.blocks import BlockTables, OutOfBlocksError
from baton.engine.memory.cached_blocks import Entry
from baton.engine.sequence import Sequence

DEVICE = "device"
# The longest that a prompt waits for blocks that are being read from a disk; then they are computed.
PATIENCE_S = 0.25


@dataclass(frozen=True, slots=True)
class Stored:
    """What a store holds; and blocks that its disk was too slow for, and files that were spoilt."""

    host_blocks: int = 0
    disk_blocks: int = 0
    disk_dropped: int = 0
    disk_corrupt: int = 0


class BlockStore(Protocol):
    """Keeps the contents of evicted blocks, as many as it has room for, by their names."""

    # Called with a name that the store has no more.
    on_lost: Callable[[bytes], None]

    def __contains__(self, name: bytes) -> bool:
        """Whether it could be loaded, now or after a while."""

    def names(self) -> set[bytes]:
        """All that it contains."""

    def put(self, entries: list[Entry]) -> None:
        """Copies out what it has room for; the blocks may be written again when this returns."""

    def ready(self, names: Run[bytes]) -> tuple[int, bool]:
        """How many of the first `names` can be loaded now, and whether more will be soon."""

    @property
    def seconds_each(self) -> float:
        """What a block that is not ready took to become so, lately; 0 before there was one."""

    def load(self, names: Run[bytes], tables: BlockTables) -> list[str]:
        """Copies what is ready into blocks, as many of every cache group; the tier that each came from."""

    def poll(self) -> bool:
        """Takes in what has been read or written meanwhile; False where that was nothing."""

    @property
    def stored(self) -> Stored:
        """For who counts."""

    def close(self) -> None:
        """Ends what runs beside the loop."""


class PrefixCache:
    """Of one engine; all calls from its loop."""

    def __init__(
        self,
        pools: BlockPools,
        hasher_of: Callable[[str], BlockHasher],
        store: BlockStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hasher_of` gives a tenant's."""
        self._pools = pools
        self._cached = pools.cached
        self._hasher_of = hasher_of
        self._store = store
        self._clock = clock
        # Block hash → whether this worker has it, in any tier: changes that were not published yet.
        self._changes: dict[bytes, bool] = {}
        self._cached.on_evict = self._evicted
        if store is not None:
            store.on_lost = self._lost
        self.hit_tokens = 0
        self.missed_tokens = 0
        self.hit_blocks: Counter[str] = Counter()

    def names(self) -> set[bytes]:
        """Every block this worker has, in whatever tier."""
        return self._cached.names() | (self._store.names() if self._store is not None else set())

    @property
    def stored(self) -> Stored:
        """What is behind the device."""
        return Stored() if self._store is None else self._store.stored

    def poll(self) -> bool:
        """Bounded work for the store; False where there was none."""
        return self._store is not None and self._store.poll()

    def close(self) -> None:
        """Once, at the end."""
        if self._store is not None:
            self._store.close()

    def name(self, sequence: Sequence, tenant: str = "") -> None:
        """Gives a sequence the names of its full blocks; without, it neither finds nor leaves anything."""
        sequence.hashes = self._hasher_of(tenant).hashes(sequence.token_ids)

    def claim(self, sequence: Sequence, computed_s: float = math.inf) -> bool:
        """Gives a sequence all of its blocks, what is cached in the first of them; False: not yet, since some
        are being read that would take longer to compute, `computed_s` each."""
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
        sequence.named = held
        self._count(sequence, held + loaded)
        return True

    def computed(self, sequence: Sequence) -> None:
        """Names the blocks that have become full."""
        full = min(len(sequence.hashes), sequence.computed // self._pools.layout.groups[0].block_tokens)
        if sequence.blocks is not None and full > sequence.named:
            tables = tuple(table[sequence.named : full] for table in sequence.blocks)
            self.keep(sequence.hashes[sequence.named : full], tables)
            sequence.named = full

    def take_over(self, names: Run[bytes], tokens: int) -> tuple[BlockTables, int]:
        """Blocks for `tokens` tokens, and how many of the first are those that bear the first of `names`:
        taken by reference, to be read and never written. Raises OutOfBlocksError, taking none."""
        held = self._held(names)
        prefix = self._acquire(names[:held])
        try:
            more = self._pools.allocate_more(prefix, tokens)
        except OutOfBlocksError:
            self._pools.release(prefix)
            raise
        self.hit_blocks[DEVICE] += held
        return tuple(mine + new for mine, new in zip(prefix, more, strict=True)), held

    def names_of(self, token_ids: Run[int], tenant: str = "", known: Run[bytes] = ()) -> tuple[bytes, ...]:
        """Those of a tenant's full blocks, the `known` first ones included."""
        return self._hasher_of(tenant).hashes(token_ids, known)

    def keep(self, names: Run[bytes], tables: BlockTables) -> None:
        """Names the first of somebody's blocks, whose contents are final; one whose name another has stays
        without."""
        for name, *blocks in zip(names, *tables, strict=False):
            if self._cached.add(name, tuple(blocks)):
                self._changes[name] = True

    def _held(self, names: Run[bytes]) -> int:
        """How many of the first are on the device."""
        return sum(1 for _ in takewhile(self._cached.__contains__, names))

    def _acquire(self, names: Run[bytes]) -> BlockTables:
        hits = [self._cached.acquire(name) for name in names]
        return tuple(zip(*hits, strict=True)) if hits else tuple(() for _ in self._pools.pools)

    def untold(self) -> dict[bytes, bool]:
        """What `take_changes` has yet to give: whether this worker has each name."""
        return dict(self._changes)

    def take_changes(self, limit: int) -> tuple[list[bytes], list[bytes]]:
        """Names that came and names that went since the last call, at most `limit` together."""
        part = dict(islice(self._changes.items(), limit))
        for name in part:
            del self._changes[name]
        came = [name for name, here in part.items() if here]
        return came, [name for name, here in part.items() if not here]

    def _wanted(self, sequence: Sequence) -> Run[bytes]:
        """The names to look for. The logprobs of a prompt need all of its rows."""
        if sequence.prompt_logprobs or (sequence.borrowed and sequence.lend is None):
            return ()
        usable = (sequence.length - 1) // self._pools.layout.groups[0].block_tokens
        return sequence.hashes[:usable]

    def _is_ready(self, sequence: Sequence, names: Run[bytes], computed_s: float) -> bool:
        """Whether nothing is worth waiting for. What is not is read all the same, for the next who asks."""
        if self._store is None or not names:
            return True
        _, coming = self._store.ready(names)
        if not coming or self._store.seconds_each > computed_s:
            return True
        if sequence.patience_ends is None:
            sequence.patience_ends = self._clock() + PATIENCE_S
        return self._clock() >= sequence.patience_ends

    def _with_rest(self, sequence: Sequence, prefix: BlockTables) -> BlockTables:
        """All blocks of a sequence that has those of `prefix`. Raises OutOfBlocksError."""
        if sequence.blocks is None:
            more = self._pools.allocate_more(prefix, sequence.length)
            return tuple(mine + new for mine, new in zip(prefix, more, strict=True))
        if sequence.lend is None or not prefix[0]:
            return sequence.blocks
        return sequence.lend(prefix)

    def _load(self, names: Run[bytes], tables: BlockTables, start: int) -> int:
        """Fills blocks from ordinal `start` on with what the store has, and names them; how many."""
        if self._store is None or not names:
            return 0
        count, _ = self._store.ready(names)  # to make room for these blocks may have cost some of them
        if count:
            filled = tuple(table[start : start + count] for table in tables)
            self.hit_blocks.update(self._store.load(names[:count], filled))
            self.keep(names[:count], filled)
        return count

    def _count(self, sequence: Sequence, blocks: int) -> None:
        tokens = blocks * self._pools.layout.groups[0].block_tokens
        sequence.computed = sequence.cached = tokens
        if not sequence.prompt_logprobs:
            self.hit_tokens += tokens
            self.missed_tokens += sequence.length - tokens

    def _evicted(self, entries: list[Entry]) -> None:
        if self._store is not None:
            self._store.put(entries)
        for name, _ in entries:
            stored = self._store is not None and name in self._store
            if not stored or name in self._changes:  # it may have been lost, and put again
                self._changes[name] = stored

    def _lost(self, name: bytes) -> None:
        if name not in self._cached:
            self._changes[name] = False
