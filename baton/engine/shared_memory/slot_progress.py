"""Progress of the slots' sequences, as steps publish it to engine and front. Torch-free.

One line of 64 bytes a slot, sixteen little-endian words of 4 bytes (`LINE`). The first two are the tag:

    generation << 32 | position of the sequence's last token, whose KV is not computed yet

written by one store of 8 bytes when the sequence advances. The generation says whose line it is: until a
slot's new sequence has advanced, the line is that of the sequence before. The counts behind it begin at 0
with each generation. A step's lines are seen no later than its words in the output ring and its status. The
counts of a line that is read while a step writes it may be of two steps that follow one another; those of a
sequence that has ended stay as they are until its slot is granted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.device.shared_memory import SharedMemory

LINE = np.dtype(
    [
        ("position", "<u4"),
        ("generation", "<u4"),
        ("steps", "<u4"),  # in which the sequence had a row
        ("drafts", "<u4"),  # rows that it had beyond its first one
        ("accepted", "<u4"),
        ("drafts_predicted", "<u4"),  # drafts that came from the request's prediction
        ("accepted_predicted", "<u4"),
        ("drafts_shared", "<u4"),  # drafts that came from the lookahead table
        ("accepted_shared", "<u4"),
        ("unused", "<u4", (7,)),
    ]
)
LINE_BYTES = LINE.itemsize
LINE_WORDS = LINE_BYTES // 4
assert LINE_BYTES == 64
_POSITIONS = 1 << 32


def position_tag(generation: int, position: int) -> int:
    """Identifies the token at `position` of the sequence that has a slot in this generation."""
    return generation << 32 | position


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of a sequence's steps: `steps` in which it had a row, `drafts` among its rows, how many of these
    were `accepted`, and the same of drafts that came from the request's prediction, and of those from the
    lookahead table."""

    steps: int = 0
    drafts: int = 0
    accepted: int = 0
    drafts_predicted: int = 0
    accepted_predicted: int = 0
    drafts_shared: int = 0
    accepted_shared: int = 0


class SlotProgress:
    """Both ends of the lines; the steps publish them, engine and front read them. `tags` [slots] int64: the
    lines' first words."""

    def __init__(self, memory: SharedMemory, offset: int, slots: int) -> None:
        self._lines = memory.region(offset, slots, LINE)
        self.tags: npt.NDArray[np.int64] = self._lines.view(np.int64)[:: LINE_BYTES // 8]

    def publish(
        self,
        slots: Sequence[int],
        generations: Sequence[int],
        positions: Sequence[int],
        counts: npt.ArrayLike = (1,),
    ) -> None:
        """Writes the positions that a step has advanced these slots to. `counts` [slots, n]: by how much it
        has advanced the first n fields of `Progress`; by default a step without drafts."""
        counts = np.asarray(counts)
        end = 2 + counts.shape[-1]
        before = self._lines[list(slots)].view(np.uint32).reshape(len(slots), LINE_WORDS)
        lines = np.zeros_like(before)
        lines[:, 0], lines[:, 1] = positions, generations
        same = before[:, 1:2] == lines[:, 1:2]
        lines[:, 2:] = np.where(same, before[:, 2:], 0)
        lines[:, 2:end] = np.add(lines[:, 2:end], counts)
        self._lines[list(slots)] = lines.view(LINE)[:, 0]

    def position(self, slot: int, generation: int) -> int | None:
        """The position of a slot's last token; None before the sequence of this generation has advanced."""
        published, position = divmod(int(self.tags[slot]), _POSITIONS)
        return position if published == generation else None

    def tokens_a_step(self) -> npt.NDArray[np.int64]:
        """Tokens that each slot's steps have given out on average, [slots], rounded up; 1 before any step."""
        steps = np.maximum(self._lines["steps"], 1).astype(np.int64)
        tokens: npt.NDArray[np.int64] = 1 - -self._lines["accepted"].astype(np.int64) // steps
        return tokens

    def counts(self) -> npt.NDArray[np.int64]:
        """Each line's generation and its counts in the order of `Progress`, [slots, 1 + fields], copied."""
        names = ("generation", *Progress.__slots__)
        return np.stack([self._lines[name].astype(np.int64) for name in names], axis=1)

    def mean_tokens_a_step(self) -> float:
        """Tokens that a step gave a sequence on average, over the slots' latest sequences; 1 before any
        step."""
        steps, accepted = int(self._lines["steps"].sum()), int(self._lines["accepted"].sum())
        return 1 + accepted / max(steps, 1)

    def progress(self, slot: int, generation: int) -> Progress:
        """The counts of a slot's sequence; zeros before the sequence of this generation has advanced."""
        line = self._lines[slot]
        if int(line["generation"]) != generation:
            return Progress()
        return Progress(*(int(line[name]) for name in Progress.__slots__))


def progress_bytes(slots: int) -> int:
    """Bytes of shared memory for the lines of `slots` slots."""
    return LINE_BYTES * slots
