"""Slots as a step's kernels see them, made from plain values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.kernels.gpu.speculation.add_drafts import RowArrays
from baton.engine.kernels.gpu.step.step_kernels import CONTROL_WORDS
from baton.engine.shared_memory.mailbox import ENTRY
from baton.engine.speculation.drafts import NO_TAG, SlotDrafts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Slot:
    """A slot's record, and the drafts that it has been given. `drafts_of`: (generation, position) that they
    are for; None: the slot's own. `budget`: how many of them a step may verify."""

    position: int
    last_token: int = 1
    generation: int = 1
    capacity: int = 1000
    end: int = 1000
    most_drafts: int = 7
    features: int = 1
    stop_ids: tuple[int, ...] = ()
    stops_from: int = 0
    drafts: tuple[int, ...] = ()
    drafts_of: tuple[int, int] | None = None
    budget: int = 7


class SlotArrays:
    """Records [slots, 32] int32 and drafts of these slots, an empty step's control, and arrays of `rows`
    rows."""

    def __init__(self, slots: list[Slot], rows: int) -> None:
        entries = np.zeros(len(slots), dtype=ENTRY)
        self.drafts = SlotDrafts(len(slots), torch.device(DEVICE))
        for number, slot in enumerate(slots):
            entry = entries[number]
            for name in ("position", "last_token", "generation", "capacity", "end", "features"):
                entry[name] = getattr(slot, name)
            entry["most_drafts"], entry["stops_from"] = slot.most_drafts, slot.stops_from
            entry["stop_ids"] = -1
            entry["stop_ids"][: len(slot.stop_ids)] = slot.stop_ids
            generation, position = slot.drafts_of or (slot.generation, slot.position)
            self.drafts.tag[number] = generation << 32 | position if slot.drafts else NO_TAG
            self.drafts.count[number] = len(slot.drafts)
            self.drafts.most[number] = slot.budget
            self.drafts.tokens[number, : len(slot.drafts)] = torch.tensor(slot.drafts, dtype=torch.int32)
        self.records = torch.from_numpy(entries.view(np.int32).reshape(len(slots), -1).copy()).to(DEVICE)
        self.control = torch.zeros(CONTROL_WORDS, dtype=torch.int64, device=DEVICE)
        self.rows = RowArrays(*(ints(rows, -9) for _ in range(5)))
        self.given = ints(len(slots), -9)

    def set_rows(self, **columns: list[int]) -> None:
        """Writes the first of the rows' arrays, by name."""
        for name, values in columns.items():
            getattr(self.rows, name)[: len(values)] = torch.tensor(values, dtype=torch.int32, device=DEVICE)


def ints(count: int, value: int = 0) -> Tensor:
    return torch.full((count,), value, dtype=torch.int32, device=DEVICE)
