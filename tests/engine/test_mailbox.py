"""The mailbox: order, the step an entry counts from, and its bound."""

from __future__ import annotations

import numpy as np
import pytest

from baton.device.shared_memory import SharedMemory
from baton.engine.mailbox import ENTRY, Entry, EntryKind, Mailbox, mailbox_bytes


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
    with pytest.raises(RuntimeError, match="full"):
        mailbox.post(entry(3))
    assert [int(e["slot"]) for e in mailbox.take(0, limit=1)] == [1]
    mailbox.post(entry(3))
    assert [int(e["slot"]) for e in mailbox.take(0, limit=4)] == [2, 3]
