"""The block pools of a worker: one for each cache group, and the cached blocks among them. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from baton.engine.memory.blocks import BlockTables, OutOfBlocksError
from baton.engine.memory.cached_blocks import CachedBlocks
from baton.model_spec.layout import Layout


class BlockPools:
    """One pool a cache group; a sequence allocates from all or from none."""

    def __init__(self, layout: Layout, num_blocks: Sequence[int]) -> None:
        self.layout = layout
        self.cached = CachedBlocks(num_blocks)
        self.pools = self.cached.pools

    def counts_for(self, tokens: int) -> tuple[int, ...]:
        """Blocks that `tokens` tokens take, by cache group."""
        return tuple(group.blocks_for(tokens) for group in self.layout.groups)

    def fits_ever(self, tokens: int) -> bool:
        """True if an empty pool would hold `tokens` tokens."""
        return all(n <= pool.total for n, pool in zip(self.counts_for(tokens), self.pools, strict=True))

    @property
    def sequence_tokens(self) -> int:
        """Tokens of one sequence that empty pools hold."""
        groups = zip(self.layout.groups, self.pools, strict=True)
        return min(pool.total * group.block_tokens for group, pool in groups)

    def allocate(self, tokens: int) -> BlockTables:
        """Blocks for `tokens` tokens in every group. Raises OutOfBlocksError, taking none."""
        return self._take(self.counts_for(tokens))

    def lacking(self, held: BlockTables, tokens: int) -> tuple[int, ...]:
        """Blocks that `held` lacks for `tokens` tokens, by cache group."""
        counts = self.counts_for(tokens)
        return tuple(max(0, count - len(blocks)) for count, blocks in zip(counts, held, strict=True))

    def allocate_more(self, held: BlockTables, tokens: int) -> BlockTables:
        """Allocates the blocks that `held` lacks. Raises OutOfBlocksError, taking none."""
        return self._take(self.lacking(held, tokens))

    def freed_with(self, owned: Iterable[BlockTables]) -> tuple[int, ...]:
        """Blocks that could be had if these gave back a reference of each of theirs, by cache group: those
        that have no other reference."""
        counts = tuple(Counter[int]() for _ in self.pools)
        for tables in owned:
            for blocks, count in zip(tables, counts, strict=True):
                count.update(blocks)
        return tuple(
            sum(pool.references(block) == mine for block, mine in count.items())
            for pool, count in zip(self.pools, counts, strict=True)
        )

    def release(self, tables: BlockTables) -> None:
        """Gives back one reference of each block; the last ones first, so that the end of a cached prefix is
        evicted before what it hangs on."""
        for pool, blocks in zip(self.pools, tables, strict=True):
            for block in reversed(blocks):
                pool.release(block)

    def _take(self, counts: Sequence[int]) -> BlockTables:
        for count, available in zip(counts, self.available(), strict=True):
            if count > available:
                raise OutOfBlocksError(count, available)
        self.cached.evict_for(counts)
        return tuple(pool.allocate(count) for count, pool in zip(counts, self.pools, strict=True))

    def available(self) -> tuple[int, ...]:
        """Blocks that can be allocated now, by cache group: free ones and those that may be evicted."""
        return tuple(pool.free + self.cached.idle for pool in self.pools)

    @property
    def free(self) -> int:
        """Blocks that can be allocated now, in all groups."""
        return sum(self.available())

    @property
    def total(self) -> int:
        return sum(pool.total for pool in self.pools)

    @property
    def pinned(self) -> int:
        return sum(pool.pinned for pool in self.pools)

    def check_integrity(self, owned: Iterable[BlockTables]) -> None:
        """Checks `BlockPool.check_integrity` over all groups, for the tables of every live sequence and
        ticket."""
        by_group: list[list[int]] = [[] for _ in self.pools]
        for tables in owned:
            for blocks, mine in zip(tables, by_group, strict=True):
                mine.extend(blocks)
        for pool, mine in zip(self.pools, by_group, strict=True):
            pool.check_integrity(mine)
        self.cached.check_integrity()
