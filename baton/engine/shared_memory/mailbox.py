"""The mailbox: how the host changes slots without stopping the steps.

A ring of fixed entries in the worker's shared memory. The engine's loop writes them, the step
reads them; an entry has the first step that may apply it, and a step leaves it and all behind it until
that step has come. Small words only: a slot's block table, logit bias and token counts are copied into
the step's own arrays before its admission is posted.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from baton.device.shared_memory import SharedMemory

MAX_STOP_IDS = 8
HEADER_BYTES = 64  # the reader's tail, on a cache line of its own


class EntryKind(IntEnum):
    ADMIT = 1
    CANCEL = 2
    EXTEND = 3  # its blocks hold `capacity` tokens now
    PREEMPT = 4  # a cancel whose sequence continues on another worker


class Feature(IntFlag):
    """Capabilities that a step needs for an entry; a bit mask."""

    GREEDY = 1
    TEMPERATURE = 2
    FILTERS = 4
    BIAS = 8
    PENALTIES = 16
    MIN_TOKENS = 32
    LOGPROBS = 64
    MASKED = 128  # draws only by a mask made for that very token
    DRAFTS = 256  # steps may verify drafts of it, which either sampler can


ENTRY = np.dtype(
    [
        ("lap", "<u8"),  # written last; the entry counts when it is the reader's own lap
        ("from_step", "<u8"),
        ("kind", "<u2"),
        ("most_drafts", "<u2"),  # that one step may verify of the sequence
        ("slot", "<u4"),
        ("generation", "<u4"),
        ("features", "<u4"),
        ("last_token", "<i4"),
        ("position", "<i4"),  # index in the sequence of last_token, whose KV is not computed yet
        ("end", "<i4"),  # length of the sequence at which it ends
        ("capacity", "<i4"),  # tokens that the granted blocks hold
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("top_p", "<f4"),
        ("top_n_sigma", "<f4"),
        ("seed", "<i8"),
        ("stop_ids", "<i4", (MAX_STOP_IDS,)),  # unused places negative
        ("min_p", "<f4"),
        ("repetition_penalty", "<f4"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("stops_from", "<i4"),  # index in the sequence of the first token that a stop id may be
        ("logprobs", "<i4"),  # how many of the likeliest tokens' are reported
    ]
)
assert ENTRY.itemsize == 128

Entry = npt.NDArray[np.void]


def field_offset(field: str) -> int:
    """Bytes from an entry's beginning to a field."""
    return int(ENTRY.fields[field][1]) if ENTRY.fields is not None else 0


def mailbox_bytes(capacity: int) -> int:
    return HEADER_BYTES + ENTRY.itemsize * capacity


class Mailbox:
    """The mailbox, at both ends; each process uses its own half: `post` the host's, `take` the step's."""

    def __init__(self, memory: SharedMemory, offset: int, capacity: int) -> None:
        self.capacity = capacity
        self._tail = memory.region(offset, 1, np.uint64)
        self._entries = memory.region(offset + HEADER_BYTES, capacity, ENTRY)
        self._posted = 0
        self._taken = 0

    @property
    def pending(self) -> int:
        """Entries posted and not yet applied."""
        return self._posted - int(self._tail[0])

    @property
    def posted(self) -> int:
        """Number of entries posted so far."""
        return self._posted

    def post(self, entry: Entry) -> None:
        """Publishes one entry (a 0-d or 1-element ENTRY array). Raises RuntimeError when there is no room."""
        if self.pending >= self.capacity:
            raise RuntimeError("the mailbox is full")
        place = self._entries[self._posted % self.capacity : self._posted % self.capacity + 1]
        lap = self._posted // self.capacity + 1
        entry["lap"] = place["lap"]  # keep the old lap until everything else stands
        place[:] = entry
        place["lap"] = lap
        self._posted += 1

    def take(self, step: int, limit: int) -> list[Entry]:
        """The entries that count at `step`, in order, at most `limit`."""
        taken: list[Entry] = []
        while len(taken) < limit:
            index = self._taken % self.capacity
            entry = self._entries[index]
            if int(entry["lap"]) != self._taken // self.capacity + 1 or int(entry["from_step"]) > step:
                break
            taken.append(entry.copy())
            self._taken += 1
        if taken:
            self._tail[0] = self._taken
        return taken
