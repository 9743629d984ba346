"""The layout of the memory that a worker's processes share: mailbox, output ring, the slots' progress and the
heartbeat. Torch-free.

The memory begins with the sizes that it is laid out for: written by who opens it first, its creator, and
compared by all others, since they would read at one place what is written at another.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from baton.base.errors import BatonError, ErrorKind
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
from baton.engine.shared_memory.slot_progress import SlotProgress, progress_bytes
from baton.engine.shared_memory.step_shape import StepShape

_PAGE = 4096
_SIZES_BYTES = 64


@dataclass(frozen=True, slots=True)
class SharedRings:
    """Sizes and offsets, computed alike by all processes. Opening a part of memory that is laid out for other
    sizes raises BatonError(INVALID).

    `slots`: a bound of those that the engine has; it decides how many when it knows its memory.
    `max_logprobs`: alternatives that a token's record holds; 0: the ring carries no logprobs.
    `rows_per_slot`: see `StepShape`, a bound like `slots`.
    """

    slots: int
    max_logprobs: int = MAX_LOGPROBS
    rows_per_slot: int = 1

    @property
    def mailbox_entries(self) -> int:
        """Number of entries of the mailbox: every slot may be admitted and cancelled before a step runs, with
        as much to spare."""
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
        return _page_after(_SIZES_BYTES + mailbox_bytes(self.mailbox_entries))

    @property
    def _records_offset(self) -> int:
        return _page_after(self._ring_offset + ring_bytes(self.ring_words))

    @property
    def _progress_offset(self) -> int:
        return _page_after(self._records_offset + logprob_bytes(self.ring_words, self.max_logprobs))

    @property
    def _heartbeat_offset(self) -> int:
        return _page_after(self._progress_offset + progress_bytes(self.slots))

    @property
    def mailbox_place(self) -> tuple[int, int]:
        """Bytes at which the mailbox's tail and its entries begin, for kernels that read them there."""
        return _SIZES_BYTES, _SIZES_BYTES + HEADER_BYTES

    @property
    def ring_place(self) -> tuple[int, int]:
        """Bytes at which the ring's counters and its words begin."""
        return self._ring_offset, self._ring_offset + RING_HEADER_BYTES

    @property
    def records_place(self) -> tuple[int, int]:
        """Offset of the logprobs' records, and their number of 4-byte words; one word if there are none,
        since a kernel wants an address."""
        if not self.max_logprobs:
            return 0, 1
        return self._records_offset, logprob_bytes(self.ring_words, self.max_logprobs) // 4

    @property
    def progress_place(self) -> tuple[int, int]:
        """Offset of the slots' lines of progress, and their number of 8-byte words."""
        return self._progress_offset, progress_bytes(self.slots) // 8

    def check(self, memory: SharedMemory) -> None:
        """Lays out new memory for these sizes. Raises BatonError(INVALID) where it is laid out for others."""
        made_for, mine = memory.region(0, 3, np.uint32), astuple(self)
        if not made_for.any():
            made_for[:] = mine
        elif tuple(made_for.tolist()) != mine:
            made = SharedRings(*made_for.tolist())
            raise BatonError(ErrorKind.INVALID, f"the shared memory is that of {made}, not of {self}")

    def __str__(self) -> str:
        return f"{self.slots} slots, rows_per_slot {self.rows_per_slot} and max_logprobs {self.max_logprobs}"

    def mailbox(self, memory: SharedMemory) -> Mailbox:
        self.check(memory)
        return Mailbox(memory, self.mailbox_place[0], self.mailbox_entries)

    def writer(self, memory: SharedMemory) -> RingWriter:
        self.check(memory)
        return RingWriter(memory, self._ring_offset, self.ring_words, self._records(memory))

    def progress(self, memory: SharedMemory) -> SlotProgress:
        self.check(memory)
        return SlotProgress(memory, self._progress_offset, self.slots)

    def reader(self, memory: SharedMemory) -> RingReader:
        self.check(memory)
        return RingReader(memory, self._ring_offset, self.ring_words, self._records(memory))

    def observer(self, memory: SharedMemory) -> RingObserver:
        self.check(memory)
        return RingObserver(memory, self._ring_offset, self.ring_words)

    def heartbeat(self, memory: SharedMemory) -> Heartbeat:
        self.check(memory)
        return Heartbeat(memory, self._heartbeat_offset)

    def _records(self, memory: SharedMemory) -> LogprobRecords | None:
        if not self.max_logprobs:
            return None
        return LogprobRecords(memory, self._records_offset, self.ring_words, self.max_logprobs)


def _page_after(offset: int) -> int:
    return -(-offset // _PAGE) * _PAGE
