"""The fixed places of a decode worker's batch, and who may use which. Torch-free.

free ──grant──▶ granted ──release──▶ free        each grant raises the slot's generation, so that
                                                 words of an earlier sequence are distinguished
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.base.errors import BatonError, ErrorKind
from baton.engine.memory.blocks import BlockTables
from baton.engine.shared_memory.output_ring import GENERATIONS, MAX_SLOTS


@dataclass(frozen=True, slots=True)
class Grant:
    """A promise: one slot, and blocks for as many tokens as it is given now."""

    slot: int
    generation: int
    blocks: BlockTables
    capacity: int  # tokens the blocks were taken for


class SlotPool:
    """Gives out slots oldest-freed first, so that a generation takes long to come round."""

    def __init__(self, slots: int) -> None:
        if not 1 <= slots <= MAX_SLOTS:
            raise ValueError(f"{slots} slots; a word of the output ring names 1 to {MAX_SLOTS}")
        self.total = slots
        self._free = deque(range(slots))
        self._generations = [0] * slots
        self._granted: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def grant(self) -> tuple[int, int]:
        """A slot and its new generation. Raises BatonError(OVERLOADED) when all are taken."""
        if not self._free:
            raise BatonError(ErrorKind.OVERLOADED, f"all {self.total} slots are taken")
        slot = self._free.popleft()
        self._generations[slot] = (self._generations[slot] + 1) % GENERATIONS
        self._granted.add(slot)
        return slot, self._generations[slot]

    def release(self, slot: int, generation: int) -> None:
        if slot not in self._granted or self._generations[slot] != generation:
            raise ValueError(f"slot {slot} is not granted in generation {generation}")
        self._granted.remove(slot)
        self._free.append(slot)
