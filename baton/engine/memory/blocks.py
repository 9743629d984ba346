"""Who holds which KV block: reference counts of every cache group's blocks. Torch-free.

    free ──allocate──▶ held (references ≥ 1) ──release to 0──▶ free, or idle where its contents are kept
                        │  ▲                                    └─ evicted where a block is needed ─▶ free
                      pin  unpin          a pin is a reference of a transfer that still reads the block

Whoever asks what is free is told of idle blocks too: to have them is to ask for them (`cached_blocks`).
Block 0 of each group is scratch: padding may write there, nobody owns it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from baton.engine.memory.cached_blocks import CachedBlocks
from baton.errors import BatonError, ErrorKind
from baton.layout import Layout

BlockTables = tuple[tuple[int, ...], ...]
"""Block numbers of one sequence in token order, by cache group."""


class OutOfBlocksError(BatonError):
    """Too few free blocks now; nothing was taken."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(ErrorKind.OVERLOADED, f"{wanted} blocks wanted, {free} free")


class BlockPool:
    """Reference counts of one cache group's blocks."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError("a pool needs the scratch block and at least one more")
        self.total = num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))
        self._references = [0] * num_blocks
        self._pins: Counter[int] = Counter()
        # Blocks that do not become free with their last reference: `on_idle` is told instead.
        self.kept: set[int] = set()
        self.on_idle: Callable[[int], None] = lambda block: None

    @property
    def free(self) -> int:
        """Blocks without references whose contents nobody keeps."""
        return len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    @property
    def pinned(self) -> int:
        """Blocks with at least one pin."""
        return len(self._pins)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Takes `count` blocks with one reference each. Raises OutOfBlocksError, taking none."""
        if count > len(self._free):
            raise OutOfBlocksError(count, len(self._free))
        blocks = tuple(self._free.pop() for _ in range(count))
        for block in blocks:
            self._references[block] = 1
        return blocks

    def retain(self, block: int) -> None:
        if self._references[block] < 1:
            raise ValueError(f"block {block} is free and cannot be retained")
        self._references[block] += 1

    def release(self, block: int) -> None:
        if block == 0 or self._references[block] < 1:
            raise ValueError(f"block {block} has no reference to release")
        self._references[block] -= 1
        if self._references[block] == 0:
            if block in self.kept:
                self.on_idle(block)
            else:
                self._free.append(block)

    def keep(self, block: int) -> None:
        """A held block's contents outlive its references."""
        if self._references[block] < 1:
            raise ValueError(f"block {block} is free and cannot be kept")
        self.kept.add(block)

    def retain_kept(self, block: int) -> None:
        """`retain` that an idle block may be given, too."""
        if block not in self.kept:
            raise ValueError(f"the contents of block {block} are not kept")
        self._references[block] += 1

    def free_kept(self, block: int) -> None:
        """An idle block is free."""
        if block not in self.kept or self._references[block]:
            raise ValueError(f"block {block} is not idle")
        self.kept.remove(block)
        self._free.append(block)

    def pin(self, block: int) -> None:
        self.retain(block)
        self._pins[block] += 1

    def unpin(self, block: int) -> None:
        if self._pins[block] < 1:
            raise ValueError(f"block {block} has no pin")
        self._pins[block] -= 1
        if self._pins[block] == 0:
            del self._pins[block]
        self.release(block)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Raises RuntimeError unless references are exactly the owners' (one an occurrence) and the pins."""
        expected = Counter(owned)
        expected.update(self._pins)
        for block, references in enumerate(self._references):
            if references != expected[block]:
                raise RuntimeError(
                    f"block {block} has {references} references, its owners hold {expected[block]}"
                )
        free = set(self._free)
        if len(free) != len(self._free) or any(self._references[block] for block in free) or 0 in free:
            raise RuntimeError("the free list holds a block twice, or one in use")
        if free & self.kept:
            raise RuntimeError("the free list holds a block whose contents are kept")
        idle = sum(1 for block in self.kept if not self._references[block])
        if len(free) + idle + sum(1 for count in self._references if count) != self.total:
            raise RuntimeError("a block is neither free, idle nor held")


class BlockPools:
    """One pool a cache group; a sequence takes from all or from none."""

    def __init__(self, layout: Layout, num_blocks: Sequence[int]) -> None:
        self.layout = layout
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        self.cached = CachedBlocks(self.pools)

    def counts_for(self, tokens: int) -> tuple[int, ...]:
        """Blocks that `tokens` tokens take, by cache group."""
        return tuple(group.blocks_for(tokens) for group in self.layout.groups)

    def fits_ever(self, tokens: int) -> bool:
        """Whether an empty pool would hold `tokens` tokens."""
        return all(n <= pool.total for n, pool in zip(self.counts_for(tokens), self.pools, strict=True))

    def allocate(self, tokens: int) -> BlockTables:
        """Blocks for `tokens` tokens in every group. Raises OutOfBlocksError, taking none."""
        return self._take(self.counts_for(tokens))

    def lacking(self, held: BlockTables, tokens: int) -> tuple[int, ...]:
        """Blocks that `held` lacks for `tokens` tokens, by cache group."""
        counts = self.counts_for(tokens)
        return tuple(max(0, count - len(blocks)) for count, blocks in zip(counts, held, strict=True))

    def allocate_more(self, held: BlockTables, tokens: int) -> BlockTables:
        """What is lacking. Raises OutOfBlocksError, taking none."""
        return self._take(self.lacking(held, tokens))

    def freed_with(self, owned: Iterable[BlockTables]) -> tuple[int, ...]:
        """Blocks that could be had if these gave back a reference of each of theirs, by cache group: those
        that nobody else has too."""
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
        """Blocks that could be had now, by cache group: free ones and those that may be evicted."""
        return tuple(pool.free + self.cached.idle for pool in self.pools)

    @property
    def free(self) -> int:
        """Blocks that could be had now."""
        return sum(self.available())

    @property
    def total(self) -> int:
        return sum(pool.total for pool in self.pools)

    @property
    def pinned(self) -> int:
        return sum(pool.pinned for pool in self.pools)

    def check_integrity(self, owned: Iterable[BlockTables]) -> None:
        """`BlockPool.check_integrity` over all groups, for the tables of every live sequence and ticket."""
        by_group: list[list[int]] = [[] for _ in self.pools]
        for tables in owned:
            for blocks, mine in zip(tables, by_group, strict=True):
                mine.extend(blocks)
        for pool, mine in zip(self.pools, by_group, strict=True):
            pool.check_integrity(mine)
        self.cached.check_integrity()
