"""The output ring: order, laps, and what happens when the reader is late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.device.shared_memory import SharedMemory
from baton.engine.output_ring import Finish, Record, RingReader, RingWriter, ring_bytes


def make_ring(capacity: int) -> tuple[RingWriter, RingReader]:
    memory = SharedMemory.create("test-ring", ring_bytes(capacity))
    return RingWriter(memory, 0, capacity), RingReader(SharedMemory.attach(memory.fd), 0, capacity)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8)), max_size=300))
def test_every_word_arrives_once_and_in_order(turns: list[tuple[bool, int]]) -> None:
    writer, reader = make_ring(8)
    written: list[Record] = []
    read: list[Record] = []
    for writes, count in turns:
        if writes and writer.room() >= count:
            records = [
                Record(
                    slot=n % 4096, generation=n * 7 % 65536, token=n * 131 % (1 << 24), finish=Finish(n % 5)
                )
                for n in range(len(written), len(written) + count)
            ]
            writer.write(
                [r.token for r in records],
                [r.slot for r in records],
                [r.generation for r in records],
                [r.finish for r in records],
            )
            written += records
        else:
            read += reader.read(limit=count)
        assert writer.room() == 8 - (len(written) - len(read))
    assert read + reader.read() == written


def test_a_thousand_laps_do_not_confuse_the_reader() -> None:
    writer, reader = make_ring(2)
    for n in range(2000):
        writer.write([n], [1], [2], [Finish.NONE])
        assert [record.token for record in reader.read()] == [n]
        assert reader.read() == []


def test_a_full_ring_is_never_overwritten() -> None:
    writer, reader = make_ring(4)
    writer.write([1, 2, 3, 4], [0] * 4, [0] * 4, [0] * 4)
    assert writer.room() == 0
    with pytest.raises(RuntimeError, match="overrun"):
        writer.write([5], [0], [0], [0])
    assert [record.token for record in reader.read()] == [1, 2, 3, 4]


def test_extreme_fields_survive() -> None:
    writer, reader = make_ring(2)
    writer.write([(1 << 24) - 1], [4095], [65535], [Finish.MOVED])
    (record,) = reader.read()
    assert record == Record(4095, 65535, (1 << 24) - 1, Finish.MOVED)
    assert not record.has_token


def test_counters_are_seen_by_the_other_side() -> None:
    writer, reader = make_ring(2)
    writer.count_step()
    writer.count_step()
    writer.count_full()
    writer.count_held(3)
    assert (reader.steps, reader.full_steps, reader.held_rows) == (2, 1, 3)
