"""Where mailbox and output ring lie in the memory that a worker's two processes share. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from baton.device.shared_memory import SharedMemory
from baton.engine.mailbox import Mailbox, mailbox_bytes
from baton.engine.output_ring import RingReader, RingWriter, ring_bytes

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class SharedRings:
    """Sizes and offsets, computed alike by both processes from the number of slots."""

    slots: int

    @property
    def mailbox_entries(self) -> int:
        """Every slot may be admitted and cancelled before a step runs, with as much to spare."""
        return 4 * self.slots

    @property
    def ring_words(self) -> int:
        """A power of two that holds at least 64 steps of all slots: a reader may be that late."""
        return 1 << (64 * self.slots - 1).bit_length()

    @property
    def size(self) -> int:
        return self._ring_offset + ring_bytes(self.ring_words)

    @property
    def _ring_offset(self) -> int:
        return -(-mailbox_bytes(self.mailbox_entries) // _PAGE) * _PAGE

    def mailbox(self, memory: SharedMemory) -> Mailbox:
        return Mailbox(memory, 0, self.mailbox_entries)

    def writer(self, memory: SharedMemory) -> RingWriter:
        return RingWriter(memory, self._ring_offset, self.ring_words)

    def reader(self, memory: SharedMemory) -> RingReader:
        return RingReader(memory, self._ring_offset, self.ring_words)
