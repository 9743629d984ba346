"""The owners of KV blocks: reference counts of every cache group's blocks. Torch-free.

    free ──allocate──▶ held (references ≥ 1) ──release to 0──▶ free, or idle where its contents are kept
                        │  ▲                                    └─ evicted where a block is needed ─▶ free
                      pin  unpin          a pin is a reference of a transfer that still reads the block

Idle blocks count as available: allocating evicts them (`cached_blocks`). Block 0 of each group is scratch:
padding may write there, and it has no owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from baton.base.errors import BatonError, ErrorKind, FailureCause

BlockTables = tuple[tuple[int, ...], ...]
"""Block numbers of one sequence in token order, by cache group."""


class OutOfBlocksError(BatonError):
    """Too few free blocks now; nothing was taken."""

    def __init__(self, wanted: int, free: int) -> None:
        message = f"{wanted} blocks wanted, {free} free"
        super().__init__(ErrorKind.OVERLOADED, message, cause=FailureCause.BLOCKS)


class BlockPool:
    """Reference counts of one cache group's blocks."""

    def __init__(self, num_blocks: int, on_idle: Callable[[int], None] = lambda block: None) -> None:
        """`on_idle`: called with a block whose last reference was released and whose contents are kept."""
        if num_blocks < 2:
            raise ValueError("a pool needs the scratch block and at least one more")
        self.total = num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))
        self._references = [0] * num_blocks
        self._pins: Counter[int] = Counter()
        # Blocks that do not become free with their last reference.
        self.kept: set[int] = set()
        self._on_idle = on_idle

    @property
    def free(self) -> int:
        """Blocks without references whose contents are not kept."""
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
                self._on_idle(block)
            else:
                self._free.append(block)

    def keep(self, block: int) -> None:
        """Keeps a held block's contents after its last reference."""
        if self._references[block] < 1:
            raise ValueError(f"block {block} is free and cannot be kept")
        self.kept.add(block)

    def retain_kept(self, block: int) -> None:
        """Takes a reference like `retain`, of a block that may be idle, too."""
        if block not in self.kept:
            raise ValueError(f"the contents of block {block} are not kept")
        self._references[block] += 1

    def free_kept(self, block: int) -> None:
        """Frees an idle block and its contents."""
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
