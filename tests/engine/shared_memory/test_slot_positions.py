"""Positions that steps publish: by generation, at the bounds of both, and with the sizes of the rings."""

from __future__ import annotations

import pytest

from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.output_ring import GENERATIONS


def test_a_position_is_that_of_its_generation_alone() -> None:
    rings = SharedRings(3)
    memory = SharedMemory.create("rings", rings.size)
    steps, host = rings.positions(memory), rings.positions(SharedMemory.attach(memory.fd))
    assert host.position(2, 1) is None, "zeroed memory holds no position of a first tenant"
    steps.publish([2, 0], [1, GENERATIONS - 1], [7, 2**31 - 1])
    assert [host.position(2, generation) for generation in (0, 1, 2)] == [None, 7, None]
    assert host.position(0, GENERATIONS - 1) == 2**31 - 1
    assert host.position(1, 1) is None


@pytest.mark.parametrize("rows", [1, 4])
def test_all_parts_lie_apart_whatever_rows_a_slot_has(rows: int) -> None:
    """No part of the shared memory overwrites another."""
    rings = SharedRings(5, rows_per_slot=rows)
    memory = SharedMemory.create("rings", rings.size)
    writer, reader, beat = rings.writer(memory), rings.reader(memory), rings.heartbeat(memory)
    rings.positions(memory).publish(range(5), [1] * 5, range(5))
    beat.beat(0.5)
    room = writer.room()
    assert room >= 64 * 5 * rows
    writer.write([9] * room, [4] * room, [1] * room, [0] * room)
    assert beat.read() == (1, 0.5)
    assert [rings.positions(memory).position(slot, 1) for slot in range(5)] == list(range(5))
    assert len(reader.read(room)) == room
