"""Where mailbox, output ring, the slots' positions and the heartbeat lie in the memory that a worker's two
processes share. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.heartbeat import HEARTBEAT_BYTES, Heartbeat
from baton.engine.shared_memory.logprob_records import MAX_LOGPROBS, LogprobRecords, logprob_bytes
from baton.engine.shared_memory.mailbox import HEADER_BYTES, Mailbox, mailbox_bytes
from baton.engine.shared_memory.output_ring import (
    RING_HEADER_BYTES,
    RingObserver,
    RingReader,
    RingWriter,
    ring_bytes,
)
from baton.engine.shared_memory.slot_positions import SlotPositions, positions_bytes
from baton.engine.shared_memory.step_shape import StepShape

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class SharedRings:
    """Sizes and offsets, computed alike by both processes.

    `slots`: a bound of those that the engine has; it decides how many when it knows its memory.
    `max_logprobs`: alternatives that a token's record holds; 0: the ring carries no logprobs.
    `rows_per_slot`: see `StepShape`.
    """

    slots: int
    max_logprobs: int = MAX_LOGPROBS
    rows_per_slot: int = 1

    @property
    def mailbox_entries(self) -> int:
        """Every slot may be admitted and cancelled before a step runs, with as much to spare."""
        return 4 * self.slots

    @property
    def ring_words(self) -> int:
        """A power of two that holds at least 64 steps of all slots: a reader may be that late."""
        return 1 << (64 * StepShape(self.slots, self.rows_per_slot).rows - 1).bit_length()

    @property
    def size(self) -> int:
        return self._heartbeat_offset + HEARTBEAT_BYTES

    @property
    def _ring_offset(self) -> int:
        return _page_after(mailbox_bytes(self.mailbox_entries))

    @property
    def _records_offset(self) -> int:
        return _page_after(self._ring_offset + ring_bytes(self.ring_words))

    @property
    def _positions_offset(self) -> int:
        return _page_after(self._records_offset + logprob_bytes(self.ring_words, self.max_logprobs))

    @property
    def _heartbeat_offset(self) -> int:
        return _page_after(self._positions_offset + positions_bytes(self.slots))

    @property
    def mailbox_place(self) -> tuple[int, int]:
        """Bytes at which the mailbox's tail and its entries begin, for kernels that read them there."""
        return 0, HEADER_BYTES

    @property
    def ring_place(self) -> tuple[int, int]:
        """Bytes at which the ring's counters and its words begin."""
        return self._ring_offset, self._ring_offset + RING_HEADER_BYTES

    @property
    def records_place(self) -> tuple[int, int]:
        """Where the logprobs' records begin, and how many 4-byte words they are; one word where there are
        none, since a kernel wants an address."""
        if not self.max_logprobs:
            return 0, 1
        return self._records_offset, logprob_bytes(self.ring_words, self.max_logprobs) // 4

    @property
    def positions_place(self) -> tuple[int, int]:
        """Where the slots' positions begin, and how many 8-byte words they are."""
        return self._positions_offset, self.slots

    def mailbox(self, memory: SharedMemory) -> Mailbox:
        return Mailbox(memory, 0, self.mailbox_entries)

    def writer(self, memory: SharedMemory) -> RingWriter:
        return RingWriter(memory, self._ring_offset, self.ring_words, self._records(memory))

    def positions(self, memory: SharedMemory) -> SlotPositions:
        return SlotPositions(memory, *self.positions_place)

    def reader(self, memory: SharedMemory) -> RingReader:
        return RingReader(memory, self._ring_offset, self.ring_words, self._records(memory))

    def observer(self, memory: SharedMemory) -> RingObserver:
        return RingObserver(memory, self._ring_offset, self.ring_words)

    def heartbeat(self, memory: SharedMemory) -> Heartbeat:
        return Heartbeat(memory, self._heartbeat_offset)

    def _records(self, memory: SharedMemory) -> LogprobRecords | None:
        if not self.max_logprobs:
            return None
        return LogprobRecords(memory, self._records_offset, self.ring_words, self.max_logprobs)


def _page_after(offset: int) -> int:
    return -(-offset // _PAGE) * _PAGE
