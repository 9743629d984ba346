"""Positions of the slots' sequences, as steps publish them to their host. Torch-free.

One word of 8 bytes a slot, written by one store when its sequence advances:

    generation << 32 | position of the sequence's last token, whose KV is not computed yet

The generation says whose position it is: until a slot's new sequence has advanced, the word is that of the
sequence before. The words of a step are seen no later than its end is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.device.shared_memory import SharedMemory

_POSITIONS = 1 << 32


def position_tag(generation: int, position: int) -> int:
    """Identifies the token at `position` of the sequence that has a slot in this generation."""
    return generation << 32 | position


def positions_bytes(slots: int) -> int:
    """Shared memory that the words of so many slots take."""
    return 8 * slots


class SlotPositions:
    """Both ends of the words; the steps publish them, their host reads them. `tags` [slots] int64: the words
    themselves."""

    def __init__(self, memory: SharedMemory, offset: int, slots: int) -> None:
        self.tags: npt.NDArray[np.int64] = memory.region(offset, slots, np.int64)

    def publish(self, slots: Sequence[int], generations: Sequence[int], positions: Sequence[int]) -> None:
        """Writes the positions that a step has advanced these slots to."""
        words = [position_tag(*each) for each in zip(generations, positions, strict=True)]
        self.tags[list(slots)] = words

    def position(self, slot: int, generation: int) -> int | None:
        """The position of a slot's last token; None before the sequence of this generation has advanced."""
        published, position = divmod(int(self.tags[slot]), _POSITIONS)
        return position if published == generation else None
