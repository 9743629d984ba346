"""A step's end: each slot advances once, by the rows that count; its words, line of progress and counters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import triton

from baton.device.shared_memory import SharedMemory
from baton.engine.kernels.gpu.step import step_kernels as kernels
from baton.engine.kernels.gpu.step.finish import LINE_WORDS, finish
from baton.engine.shared_memory.mailbox import Feature, field_offset
from baton.engine.shared_memory.output_ring import Finish, RingObserver, ring_bytes
from baton.engine.shared_memory.slot_progress import Progress, SlotProgress, progress_bytes
from baton.engine.speculation.drafts import Source
from tests.engine.kernels.gpu.speculation.slot_arrays import DEVICE, Slot, SlotArrays, ints

VOCAB = 97
RING_WORDS = 16


@dataclass(frozen=True)
class Row:
    """A row at a step's end. `counts`: it writes its token."""

    slot: int
    token: int
    depth: int = 0
    counts: bool = True


class Ending:
    """Slots, a ring of 16 words whose reader is at `head`, and lines of progress."""

    def __init__(self, slots: list[Slot], head: int = 0) -> None:
        self.slots = slots
        self.arrays = SlotArrays(slots, 16)
        self.head = head
        self.counted = torch.zeros(len(slots), LINE_WORDS.value, dtype=torch.int64, device=DEVICE)
        self.progress = torch.zeros_like(self.counted)
        self.words = torch.zeros(RING_WORDS, dtype=torch.int64, device=DEVICE)
        self.header = torch.zeros(40, dtype=torch.int64, device=DEVICE)
        self.active = torch.ones(len(slots), dtype=torch.bool, device=DEVICE)
        self.in_output = torch.zeros(len(slots), VOCAB, dtype=torch.int32, device=DEVICE)
        self.arrays.control[kernels.HEAD.value] = head

    def step(self, rows: list[Row], *, given: dict[int, int] | None = None, counts: bool = True) -> None:
        """`given`: drafts by slot; None: a step without drafts."""
        arrays, drafts = self.arrays, given is not None
        places = [-1] * len(rows)
        for place, number in enumerate(n for n, row in enumerate(rows) if row.counts):
            places[number] = place
        positions = self.column("position")
        arrays.set_rows(
            slot=[row.slot for row in rows],
            position=[positions[row.slot] + row.depth for row in rows],
            depth=[row.depth for row in rows],
            place=places,
        )
        for slot, count in (given or {}).items():
            arrays.given[slot] = count
        drawn = ints(16)
        drawn[: len(rows)] = torch.tensor([row.token for row in rows], dtype=torch.int32)
        control, mine = arrays.control, arrays.rows
        control[kernels.ROWS.value], control[kernels.RAN.value] = len(rows), 1
        clocks = torch.zeros(kernels.CLOCK_LINES.value, kernels.CLOCK_WIDTH.value, dtype=torch.int64)
        finish[(1,)](
            control, clocks.to(DEVICE), self.header, torch.zeros_like(control), self.words, self.progress,
            self.counted, self.active, arrays.records, self.in_output, mine.slot, mine.position, mine.place,
            drawn, mine.depth, arrays.given, arrays.drafts.source,
            SLOTS=len(self.slots), ROWS_POWER=triton.next_power_of_2(max(16, len(self.slots))),
            CAPACITY=RING_WORDS, VOCAB=VOCAB, COUNTS=counts, DRAFTS=drafts,
        )  # fmt: skip

    def column(self, field: str) -> list[int]:
        values: list[int] = self.arrays.records[:, field_offset(field) // 4].tolist()
        return values

    def read(self) -> list[tuple[int, int, Finish]]:
        """(slot, token, finish) of all words written."""
        memory = SharedMemory.create("ending", ring_bytes(RING_WORDS))
        memory.region(0, 1, np.uint64)[:] = self.head  # words that were taken
        observer = RingObserver(memory, 0, RING_WORDS)
        observer.words[:] = self.words.cpu().numpy().view(np.uint64)
        observer.start()
        written = {(slot, each & 0xFFFF) for slot, each in enumerate(self.column("generation"))}
        return [(record.slot, record.token, record.finish) for record in observer.read(written)]

    def line(self, slot: int) -> tuple[int | None, Progress]:
        """Position and counts of a slot's sequence, as its host reads them."""
        memory = SharedMemory.create("ending", progress_bytes(len(self.slots)))
        memory.region(0, self.progress.numel(), np.int64)[:] = self.progress.flatten().cpu().numpy()
        generation = self.column("generation")[slot]
        lines = SlotProgress(memory, 0, len(self.slots))
        return lines.position(slot, generation), lines.progress(slot, generation)


A, B, C = Slot(10, generation=3), Slot(20, generation=4), Slot(30, generation=65535)


def test_a_slot_advances_by_the_rows_that_count_to_the_last_of_them() -> None:
    ending = Ending([A, B, C])
    rows = [Row(2, 50), Row(2, 51, 1), Row(2, 52, 2, counts=False), Row(0, 60), Row(0, 61, 1, counts=False)]
    ending.step([*rows, Row(1, 70, counts=False)], given={2: 2, 0: 1, 1: 0})
    assert ending.read() == [(2, 50, Finish.NONE), (2, 51, Finish.NONE), (0, 60, Finish.NONE)]
    assert ending.column("position") == [11, 20, 32]
    assert ending.column("last_token") == [60, 1, 51]
    assert ending.line(0) == (11, Progress(steps=1, drafts=1))
    assert ending.line(1) == (None, Progress())
    assert ending.line(2) == (32, Progress(steps=1, drafts=2, accepted=1))
    assert ending.active.tolist() == [True] * 3
    assert int(ending.arrays.control[kernels.HEAD.value]) == 3
    assert int(ending.header[kernels.TOKENS_LINE.value]) == 3


def test_two_slots_end_in_the_midst_of_their_drafts_and_one_beside_goes_on() -> None:
    slots = [replace(A, stop_ids=(5,)), replace(B, end=24), C]
    ending = Ending(slots)
    rows = [Row(0, 7), Row(0, 5, 1), Row(0, 9, 2, counts=False), Row(1, 8), Row(1, 8, 1), Row(1, 8, 2)]
    ending.step([*rows, Row(1, 8, 3, counts=False), Row(2, 5)], given={0: 2, 1: 3, 2: 0})
    assert ending.read() == [
        *((0, 7, Finish.NONE), (0, 5, Finish.STOP)),
        *((1, 8, Finish.NONE), (1, 8, Finish.NONE), (1, 8, Finish.LENGTH)),
        (2, 5, Finish.NONE),
    ]
    assert ending.active.tolist() == [False, False, True]
    assert ending.column("position") == [12, 23, 31]
    assert int(ending.header[kernels.STATUS_LINE.value]) & 0x1FFF == 1


def test_words_go_over_the_rings_end_within_a_slot() -> None:
    for head in (14, 15, 5 * RING_WORDS - 1, 255 * RING_WORDS - 2):
        ending = Ending([A], head)
        ending.step([Row(0, 40), Row(0, 41, 1), Row(0, 42, 2), Row(0, 43, 3)], given={0: 3})
        assert [token for _, token, _ in ending.read()] == [40, 41, 42, 43]


def test_counts_go_on_from_step_to_step_and_begin_anew_with_a_generation() -> None:
    ending = Ending([A, B])
    ending.arrays.drafts.source[1] = int(Source.PREDICTION)
    both = [Row(0, 1), Row(0, 2, 1), Row(0, 2, 2, counts=False), Row(1, 3), Row(1, 4, 1)]
    ending.step(both, given={0: 2, 1: 1})
    ending.step([Row(1, 3), Row(0, 1)])
    ending.step([Row(0, 1), Row(1, 4), Row(1, 4, 1, counts=False)], given={0: 0, 1: 1})
    assert ending.line(0) == (14, Progress(3, 2, 1))
    assert ending.line(1) == (24, Progress(3, 2, 1, 2, 1))
    ending.arrays.records[1, field_offset("generation") // 4] = 5
    assert ending.line(1) == (None, Progress())
    ending.step([Row(1, 4), Row(1, 4, 1)], given={1: 1})
    assert ending.line(1) == (26, Progress(1, 1, 1, 1, 1))
    ending.arrays.drafts.source[1] = int(Source.TABLE)
    ending.step([Row(1, 4), Row(1, 4, 1)], given={1: 3})
    assert ending.line(1) == (28, Progress(2, 4, 2, 1, 1, 3, 1))
    ending.arrays.records[1, field_offset("generation") // 4] = 1  # they begin at 1 again some day
    ending.step([Row(1, 4)])
    assert ending.line(1) == (29, Progress(1))


def test_tokens_that_count_are_counted_where_the_request_penalises_them() -> None:
    penalized = int(Feature.GREEDY | Feature.PENALTIES)
    ending = Ending([replace(A, features=penalized), B])
    rows = [Row(0, 7), Row(0, 7, 1), Row(0, 8, 2), Row(0, 7, 3, counts=False), Row(1, 9)]
    ending.step(rows, given={0: 3, 1: 0})
    expected = torch.zeros(2, VOCAB, dtype=torch.int32)
    expected[0, 7], expected[0, 8] = 2, 1
    assert torch.equal(ending.in_output.cpu(), expected)
    ending.step([Row(0, 8)])
    expected[0, 8] = 2
    assert torch.equal(ending.in_output.cpu(), expected)


def test_stop_ids_that_count_from_the_next_token_on_need_no_other_sampler() -> None:
    held = int(Feature.GREEDY | Feature.MIN_TOKENS)
    for stops_from, left in ((12, False), (13, False), (14, True)):
        ending = Ending([replace(A, features=held, stops_from=stops_from)])
        ending.step([Row(0, 7), Row(0, 7, 1), Row(0, 7, 2, counts=False)], given={0: 2})
        assert ending.column("features") == [held if left else int(Feature.GREEDY)]
