"""The output ring: order, laps, and what happens when the reader is late."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.logprob_records import LogprobBatch, Logprobs
from baton.engine.shared_memory.output_ring import (
    RING_HEADER_BYTES,
    Finish,
    Record,
    RingObserver,
    RingReader,
    RingWriter,
    ring_bytes,
)

# Words that an observer reads at once, and no more than a few beyond.
MOST_OBSERVED = 4096


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


@pytest.mark.parametrize("capacity", [1, 2])
def test_a_thousand_laps_do_not_confuse_the_reader(capacity: int) -> None:
    writer, reader = make_ring(capacity)
    for n in range(2000):
        writer.write([n], [1], [2], [Finish.NONE])
        assert [record.token for record in reader.read()] == [n]
        assert reader.read() == []


def test_a_full_ring_is_never_overwritten() -> None:
    writer, reader = make_ring(4)
    writer.write([1, 2, 3, 4], [0] * 4, [0] * 4, [0] * 4)
    assert writer.room() == 0
    with pytest.raises(RuntimeError, match=r"^the output ring would overrun its reader$"):
        writer.write([5], [0], [0], [0])
    assert [record.token for record in reader.read()] == [1, 2, 3, 4]


def test_extreme_fields_survive() -> None:
    writer, reader = make_ring(2)
    writer.write([(1 << 24) - 1], [4095], [65535], [Finish.PREEMPTED])
    (record,) = reader.read()
    assert record == Record(4095, 65535, (1 << 24) - 1, Finish.PREEMPTED)
    assert not record.has_token


def test_counters_are_seen_by_the_other_side() -> None:
    writer, reader = make_ring(2)
    writer.count_step()
    writer.count_step()
    writer.count_full()
    writer.count_held(3)
    assert (reader.steps, reader.full_steps, reader.stalled_rows) == (2, 1, 3)


def batch_of(rows: list[int], count: int) -> LogprobBatch:
    """Row r: logprob -r - 1/2, and `count` alternatives (r + i, -i)."""
    index = np.array(rows, dtype=np.int64)
    places = np.arange(count, dtype=np.int64)
    return LogprobBatch(
        rows=index,
        counts=np.full(len(rows), count),
        chosen=-index.astype(np.float64) - 0.5,
        ids=index[:, None] + places,
        values=np.tile(-places.astype(np.float64), (len(rows), 1)),
    )


@given(st.lists(st.lists(st.sampled_from([None, 0, 1, 3, 20]), max_size=6), max_size=60))
def test_logprobs_arrive_with_their_words_and_only_with_them(turns: list[list[int | None]]) -> None:
    rings = SharedRings(1)
    memory = SharedMemory.create("test-logprobs", rings.size)
    writer, reader = rings.writer(memory), rings.reader(SharedMemory.attach(memory.fd))
    for words in turns:
        # A batch a word, so that each may have its own number of alternatives.
        for count in words:
            batch = None if count is None else batch_of([0], count)
            writer.write([7], [1], [2], [Finish.NONE], batch)
        for count, record in zip(words, reader.read(), strict=True):
            top = tuple((i, -float(i)) for i in range(count or 0))
            assert record.logprobs == (None if count is None else Logprobs(-0.5, top))


def test_a_batch_has_records_for_some_of_its_words_over_many_laps() -> None:
    rings = SharedRings(1)
    memory = SharedMemory.create("test-logprobs", rings.size)
    writer, reader = rings.writer(memory), rings.reader(memory)
    for turn in range(300):
        rows = [1, 4] if turn % 3 else [0, 2, 3]
        writer.write(range(5), [0] * 5, [0] * 5, [0] * 5, batch_of(rows, 2))
        reported = {record.token: record.logprobs for record in reader.read() if record.logprobs}
        assert reported == {row: Logprobs(-row - 0.5, ((row, 0.0), (row + 1, -1.0))) for row in rows}


def test_a_ring_carries_the_logprobs_it_was_made_for() -> None:
    with_them, without = SharedRings(4, 5), SharedRings(4, 0)
    memory = SharedMemory.create("test-logprobs", with_them.size)
    with pytest.raises(ValueError, match="6 alternatives"):
        with_them.writer(memory).write([1], [0], [0], [0], batch_of([0], 6))
    assert without.size < with_them.size < SharedRings(4).size
    small = SharedMemory.create("test-logprobs", without.size)
    with pytest.raises(ValueError, match=r"^this ring carries no logprobs$"):
        without.writer(small).write([1], [0], [0], [0], batch_of([0], 1))
    without.writer(small).write([1], [0], [0], [0])
    (record,) = without.reader(small).read()
    assert record.logprobs is None


def test_more_words_than_the_reader_looks_at_together() -> None:
    writer, reader = make_ring(256)
    for first in (0, 200, 400):
        numbers = range(first, first + 200)
        writer.write(numbers, [0] * 200, [0] * 200, [0] * 200)
        read = [*reader.read(limit=70), *reader.read()]
        assert [record.token for record in read] == list(numbers)
    assert reader.read() == []


def test_the_header_is_a_cache_line_a_counter() -> None:
    """Both processes and a GPU's step find each counter by its offset; none shares a line with another."""
    memory = SharedMemory.create("test-ring", ring_bytes(4))
    writer, reader = RingWriter(memory, 0, 4), RingReader(memory, 0, 4)
    writer.write([5, 6], [1, 2], [3, 4], [0, 0])
    reader.read()
    for _ in range(2):
        writer.count_step()
    for _ in range(3):
        writer.count_full()
    writer.count_held(4)
    writer.count_held(5)
    counters = memory.region(0, RING_HEADER_BYTES // 8, np.uint64)
    assert [int(counters[at]) for at in range(0, 32, 8)] == [2, 2, 3, 9]
    assert (writer.tail, writer.steps, writer.full_steps, writer.stalled_rows) == (2, 2, 3, 9)
    assert np.count_nonzero(counters) == 4
    writer.device_counters[:] = np.arange(1, 9)
    assert counters[32:40].tolist() == list(range(1, 9))
    words = memory.region(RING_HEADER_BYTES, 4, np.uint64)
    assert words.tolist() == [1 << 56 | 3 << 36 | 1 << 24 | 5, 1 << 56 | 4 << 36 | 2 << 24 | 6, 0, 0]
    assert ring_bytes(4) == RING_HEADER_BYTES + 4 * 8


def test_a_lap_is_a_whole_number() -> None:
    writer, reader = make_ring(2)
    for token in range(5):
        writer.write([token], [0], [0], [0])
        assert int(writer.words[token % 2]) >> 56 == token // 2 + 1
        reader.read()


@pytest.mark.parametrize("capacity", [3, 6, 12])
def test_a_capacity_is_a_power_of_two(capacity: int) -> None:
    with pytest.raises(ValueError, match=r"^a ring's capacity is a power of two$"):
        make_ring(capacity)


def test_a_reader_takes_no_more_than_its_limit() -> None:
    writer, reader = make_ring(256)
    writer.write(list(range(200)), [0] * 200, [0] * 200, [0] * 200)
    assert [record.token for record in reader.read(limit=1)] == [0]
    assert [record.token for record in reader.read(limit=70)] == list(range(1, 71))
    assert reader.tail == 71
    assert [record.token for record in reader.read(limit=129)] == list(range(71, 200))
    assert reader.read(limit=0) == []


def observed_ring(capacity: int) -> tuple[RingWriter, RingReader, RingObserver]:
    memory = SharedMemory.create("test-ring", ring_bytes(capacity))
    other = SharedMemory.attach(memory.fd)
    return RingWriter(memory, 0, capacity), RingReader(other, 0, capacity), RingObserver(other, 0, capacity)


def test_an_observer_reads_what_it_wants_and_takes_nothing() -> None:
    writer, reader, observer = observed_ring(8)
    writer.write([1, 2], [5, 6], [7, 7], [Finish.NONE] * 2)
    assert [one.token for one in reader.read(limit=1)] == [1]
    observer.start()
    writer.write([3, 4, 5], [5, 6, 6], [7, 8, 7], [Finish.NONE, Finish.NONE, Finish.STOP])
    wanted = {(6, 7)}
    expected = [Record(6, 7, 2, Finish.NONE), Record(6, 7, 5, Finish.STOP)]
    assert observer.read(wanted) == expected
    assert observer.read(wanted) == []
    writer.write([6], [6], [7], [Finish.NONE])
    assert [one.token for one in observer.read(wanted)] == [6]
    assert (reader.tail, writer.room()) == (1, 3)
    assert [one.token for one in reader.read()] == [2, 3, 4, 5, 6]


def test_an_observer_reads_over_the_rings_end() -> None:
    writer, reader, observer = observed_ring(4)
    for n in range(1000):
        writer.write([n], [1], [2], [Finish.NONE])
        assert [one.token for one in observer.read({(1, 2)})] == [n]
        reader.read()


def test_one_reading_of_an_observer_is_bounded() -> None:
    """A producer that is as quick as its observer does not hold it for ever."""
    writer, _, observer = observed_ring(2 * MOST_OBSERVED)
    count = 2 * MOST_OBSERVED
    writer.write(list(range(count)), [1] * count, [2] * count, [Finish.NONE] * count)
    first = [one.token for one in observer.read({(1, 2)})]
    assert MOST_OBSERVED <= len(first) < count
    rest = [one.token for one in observer.read({(1, 2)})]
    assert first + rest == list(range(count))


def test_an_observer_that_was_overtaken_is_told() -> None:
    writer, reader, observer = observed_ring(4)
    writer.write([1, 2], [1] * 2, [2] * 2, [Finish.NONE] * 2)
    assert [one.token for one in observer.read({(1, 2)})] == [1, 2]
    reader.read()
    assert observer.read({(1, 2)}) == [], "as far as the reader: nothing is lost"
    for _ in range(2):
        writer.write([3] * 4, [1] * 4, [2] * 4, [Finish.NONE] * 4)
        reader.read()
    with pytest.raises(OverflowError, match=r"^the ring was overwritten$"):
        observer.read({(1, 2)})
    observer.start()
    assert observer.read({(1, 2)}) == []
    writer.write([9], [1], [2], [Finish.NONE])
    assert [one.token for one in observer.read({(1, 2)})] == [9]
