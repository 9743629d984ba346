"""Blocks that name their owner in every byte, so that a foreign one is seen wherever it lies.

A block of transfer t is a pattern of t, its group and its ordinal; a free block is all `FREE`. Both pools
hand out the block that was freed last: what is given up is written again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

NewArray = Callable[[tuple[int, int], type[np.uint8]], NDArray[np.uint8]]

FREE = 0xEE


def pattern(owner: int, group: int, ordinal: int, size: int) -> NDArray[np.uint8]:
    """`size` bytes, each 8 of them the owner, the place and how far into the block they are."""
    head = np.uint64(owner % (1 << 32) << 32 | group << 28 | ordinal << 16)
    return (np.arange(-(-size // 8), dtype=np.uint64) | head).view(np.uint8)[:size]


class OwnedBlocks:
    """One side's blocks by cache group, each free or one owner's."""

    def __init__(self, block_bytes: Sequence[int], blocks: int, array: NewArray = np.empty) -> None:
        self.bytes = [array((blocks, size), np.uint8) for size in block_bytes]
        for group in self.bytes:
            group[:] = FREE
        self.foreign_bytes = 0
        self._free = [list(range(blocks)) for _ in block_bytes]
        self._blocks = blocks

    def room(self, counts: Sequence[int]) -> bool:
        return all(len(free) >= count for free, count in zip(self._free, counts, strict=True))

    def all_free(self) -> bool:
        return all(len(free) == self._blocks for free in self._free)

    def take(self, group: int) -> int:
        """The block freed last; a byte written since then is foreign."""
        block = self._free[group].pop()
        self.foreign_bytes += int(np.count_nonzero(self.bytes[group][block] != FREE))
        return block

    def give_back(self, group: int, block: int) -> None:
        self.bytes[group][block] = FREE
        self._free[group].append(block)

    def check(self, owner: int, places: Sequence[Sequence[int]]) -> int:
        """Bytes of these blocks that are not their owner's; counted too."""
        wrong = 0
        for group, blocks in enumerate(places):
            for ordinal, block in enumerate(blocks):
                held = self.bytes[group][block]
                wrong += int(np.count_nonzero(held != pattern(owner, group, ordinal, held.size)))
        self.foreign_bytes += wrong
        return wrong


class Source(OwnedBlocks):
    """The sender's blocks: one is free again, and soon in other use, when its one pin ends."""

    def __init__(self, block_bytes: Sequence[int], blocks: int, array: NewArray = np.empty) -> None:
        super().__init__(block_bytes, blocks, array)
        self._pinned: set[tuple[int, int]] = set()

    def write(self, owner: int, group: int, ordinal: int) -> int:
        """A pinned block with its owner's pattern."""
        block = self.take(group)
        self.bytes[group][block] = pattern(owner, group, ordinal, self.bytes[group].shape[1])
        self._pinned.add((group, block))
        return block

    @property
    def pins(self) -> int:
        return len(self._pinned)

    def read(self, group: int, block: int, offset: int, length: int) -> memoryview:
        assert (group, block) in self._pinned, "read of a block that is not pinned"
        return self.bytes[group][block, offset : offset + length].data

    def unpin(self, group: int, block: int) -> None:
        self._pinned.remove((group, block))
        self.give_back(group, block)


class Sink(OwnedBlocks):
    """The receiver's: bytes may come for transfers that have places, into those alone."""

    def __init__(self, block_bytes: Sequence[int], blocks: int, array: NewArray = np.empty) -> None:
        super().__init__(block_bytes, blocks, array)
        self.places: dict[int, list[list[int]]] = {}
        self.writable: set[int] = set()
        # Leading blocks of a transfer that are whole from the beginning, by cache group.
        self.held: dict[int, Sequence[int]] = {}

    def reserve(self, transfer: int, counts: Sequence[int], held: Sequence[int] = ()) -> None:
        self.places[transfer] = [[self.take(group) for _ in range(n)] for group, n in enumerate(counts)]
        self.writable.add(transfer)
        self.held[transfer] = held = held or [0] * len(counts)
        for group, blocks in enumerate(self.places[transfer]):
            for ordinal, block in enumerate(blocks[: held[group]]):
                here = self.bytes[group][block]
                here[:] = pattern(transfer, group, ordinal, here.size)

    def scatter(self, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview) -> None:
        block = self.place(transfer_id, group, ordinal)
        self.bytes[group][block, offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)

    def place(self, transfer_id: int, group: int, ordinal: int) -> int:
        """Returns the place of bytes that are about to be written, now or by a device."""
        assert transfer_id in self.writable, f"bytes of transfer {transfer_id}, which was given up"
        assert ordinal >= self.held[transfer_id][group], "bytes for a block that is held"
        return self.places[transfer_id][group][ordinal]

    def release(self, transfer: int) -> None:
        """Frees a transfer's blocks, which the next `reserve` takes."""
        self.writable.discard(transfer)
        del self.held[transfer]
        for group, blocks in enumerate(self.places.pop(transfer)):
            for block in blocks:
                self.give_back(group, block)
