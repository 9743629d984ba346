"""Progress that steps publish, by generation and at its bounds; memory that is laid out for other sizes."""

from __future__ import annotations

import numpy as np
import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.output_ring import GENERATIONS
from baton.engine.shared_memory.slot_progress import Progress, position_tag


def test_a_position_is_that_of_its_generation_alone() -> None:
    rings = SharedRings(3)
    memory = SharedMemory.create("rings", rings.size)
    steps, host = rings.progress(memory), rings.progress(SharedMemory.attach(memory.fd))
    assert host.position(2, 1) is None, "zeroed memory holds no position of a first tenant"
    steps.publish([2, 0], [1, GENERATIONS - 1], [7, 2**31 - 1])
    assert [host.position(2, generation) for generation in (0, 1, 2)] == [None, 7, None]
    assert host.position(0, GENERATIONS - 1) == 2**31 - 1
    assert host.position(1, 1) is None
    assert host.tags.tolist() == [position_tag(GENERATIONS - 1, 2**31 - 1), 0, position_tag(1, 7)]


def test_counts_are_those_of_their_generation_alone() -> None:
    rings = SharedRings(3)
    memory = SharedMemory.create("rings", rings.size)
    steps, host = rings.progress(memory), rings.progress(SharedMemory.attach(memory.fd))
    steps.publish([2, 1], [1, 5], [7, 9], [[1, 7, 4, 3, 1, 2, 2], [2**32 - 2, 0, 0, 0, 0, 0, 0]])
    steps.publish([1, 2], [5, 1], [10, 9])
    assert host.progress(2, 1) == Progress(2, 7, 4, 3, 1, drafts_shared=2, accepted_shared=2)
    assert host.progress(1, 5) == Progress(2**32 - 1)
    assert host.progress(2, 2) == host.progress(0, 3) == Progress()
    steps.publish([2], [2], [5])
    assert host.progress(2, 2) == Progress(1)


def test_tokens_a_step_are_rounded_up() -> None:
    """And cannot overflow: counts have 32 bits."""
    rings = SharedRings(5)
    progress = rings.progress(SharedMemory.create("rings", rings.size))
    progress.publish([0, 1, 2, 3], [1] * 4, [1] * 4, [[3, 9, a, 0, 0] for a in (0, 1, 3, 4)])
    assert progress.tokens_a_step().tolist() == [1, 2, 2, 3, 1]
    progress.publish([4], [1], [1], (1, 3, 3, 0, 0))
    assert progress.tokens_a_step()[4] == 4
    progress.publish([4], [2], [1], (2**31 + 1, 0, 2**32 - 1, 0, 0))
    assert progress.tokens_a_step()[4] == 3
    assert progress.tokens_a_step().dtype == np.int64


def test_all_lines_are_copied_with_their_generations() -> None:
    rings = SharedRings(3)
    progress = rings.progress(SharedMemory.create("rings", rings.size))
    progress.publish([2, 0], [1, 5], [7, 9], [[1, 7, 4, 3, 2, 6, 5], [2**32 - 2, 0, 0, 0, 0, 0, 0]])
    counts = progress.counts()
    progress.publish([2], [1], [8])
    assert counts.dtype == np.int64
    assert counts.tolist() == [[5, 2**32 - 2, *[0] * 6], [0] * 8, [1, 1, 7, 4, 3, 2, 6, 5]]


def test_the_mean_is_over_all_slots() -> None:
    rings = SharedRings(5)
    progress = rings.progress(SharedMemory.create("rings", rings.size))
    assert progress.mean_tokens_a_step() == 1
    progress.publish([1], [1], [1], [[1, 9, 3, 0, 0]])
    assert progress.mean_tokens_a_step() == 4
    progress.publish([3], [1], [1], [[3, 9, 3, 0, 0]])
    assert progress.mean_tokens_a_step() == 2.5


@pytest.mark.parametrize("other", [SharedRings(5), SharedRings(4, rows_per_slot=2), SharedRings(4, 0)])
@pytest.mark.parametrize("part", ["mailbox", "writer", "reader", "observer", "progress", "heartbeat"])
def test_memory_of_other_sizes_is_refused(other: SharedRings, part: str) -> None:
    """Whichever part a process opens first."""
    rings = SharedRings(4)
    memory = SharedMemory.create("rings", max(rings.size, other.size))
    getattr(rings, part)(memory)
    getattr(rings, part)(SharedMemory.attach(memory.fd))
    with pytest.raises(BatonError) as refused:
        getattr(other, part)(SharedMemory.attach(memory.fd))
    assert refused.value.kind is ErrorKind.INVALID
    assert refused.value.message == f"the shared memory is that of {rings}, not of {other}"


@pytest.mark.parametrize("rows", [1, 4])
def test_all_parts_lie_apart_whatever_rows_a_slot_has(rows: int) -> None:
    """No part of the shared memory overwrites another."""
    rings = SharedRings(5, rows_per_slot=rows)
    memory = SharedMemory.create("rings", rings.size)
    writer, reader, beat = rings.writer(memory), rings.reader(memory), rings.heartbeat(memory)
    rings.progress(memory).publish(range(5), [1] * 5, range(5))
    beat.beat(0.5)
    room = writer.room()
    assert room >= 64 * 5 * rows
    assert rings.mailbox(memory).posted == 0
    writer.write([9] * room, [4] * room, [1] * room, [0] * room)
    assert beat.read() == (1, 0.5)
    assert [rings.progress(memory).position(slot, 1) for slot in range(5)] == list(range(5))
    assert len(reader.read(room)) == room
