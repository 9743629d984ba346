"""The mailbox: order, the step an entry counts from, and its bound."""

from __future__ import annotations

import numpy as np
import pytest

from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.mailbox import (
    ENTRY,
    HEADER_BYTES,
    Entry,
    EntryKind,
    Mailbox,
    field_offset,
    mailbox_bytes,
)


def entry(slot: int, from_step: int = 0) -> Entry:
    made: Entry = np.zeros(1, dtype=ENTRY)
    made["kind"], made["slot"], made["from_step"] = EntryKind.CANCEL, slot, from_step
    return made


def make_mailbox(capacity: int) -> Mailbox:
    return Mailbox(SharedMemory.create("test-mailbox", mailbox_bytes(capacity)), 0, capacity)


def test_entries_come_in_order_over_many_laps() -> None:
    mailbox = make_mailbox(4)
    for first in range(0, 300, 3):
        for slot in range(first, first + 3):
            mailbox.post(entry(slot))
        assert mailbox.pending == 3
        assert [int(e["slot"]) for e in mailbox.take(0, limit=8)] == [first, first + 1, first + 2]
        assert mailbox.pending == 0


def test_an_entry_waits_for_its_step_and_holds_those_behind_it() -> None:
    mailbox = make_mailbox(4)
    mailbox.post(entry(1, from_step=5))
    mailbox.post(entry(2))
    assert mailbox.take(4, limit=4) == []
    assert [int(e["slot"]) for e in mailbox.take(5, limit=4)] == [1, 2]


def test_a_full_mailbox_refuses() -> None:
    mailbox = make_mailbox(2)
    mailbox.post(entry(1))
    mailbox.post(entry(2))
    with pytest.raises(RuntimeError, match=r"^the mailbox is full$"):
        mailbox.post(entry(3))
    assert [int(e["slot"]) for e in mailbox.take(0, limit=1)] == [1]
    mailbox.post(entry(3))
    assert [int(e["slot"]) for e in mailbox.take(0, limit=4)] == [2, 3]


def test_the_step_finds_an_entry_where_the_host_wrote_it() -> None:
    """A GPU reads lap and fields by these offsets, from the first entry behind a header of one cache line."""
    memory = SharedMemory.create("test-mailbox", mailbox_bytes(2))
    mailbox = Mailbox(memory, 0, 2)
    mailbox.post(entry(7))
    words = memory.region(HEADER_BYTES, 2 * ENTRY.itemsize, np.uint8).tobytes()
    assert words[field_offset("lap") : field_offset("lap") + 8] == (1).to_bytes(8, "little")
    assert words[field_offset("slot") : field_offset("slot") + 4] == (7).to_bytes(4, "little")
    assert [field_offset(name) for name in ("lap", "from_step", "kind", "slot", "seed")] == [0, 8, 16, 20, 64]
    mailbox.take(0, limit=1)
    assert memory.region(0, 1, np.uint64)[0] == 1, "the reader publishes how many it has taken"


def test_the_lap_of_an_entry_is_a_whole_number() -> None:
    mailbox = make_mailbox(2)
    for slot in range(5):
        mailbox.post(entry(slot))
        (taken,) = mailbox.take(0, limit=1)
        assert (int(taken["slot"]), int(taken["lap"])) == (slot, slot // 2 + 1)
        assert mailbox.posted == slot + 1
