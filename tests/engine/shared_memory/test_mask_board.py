"""The mask board: a mask is taken once, by its tag, and never while it is being written."""

from __future__ import annotations

from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.mask_board import MOST_PROCESSES, MaskBoard, mask_words
from baton.engine.shared_memory.output_ring import Finish


def write(board: MaskBoard, slot: int, generation: int, position: int, *mask: int) -> None:
    board.begin(slot)[:] = mask
    board.publish(slot, generation, position)


def test_each_mask_is_taken_once() -> None:
    written, memory = MaskBoard.create(slots=3, vocab_size=70)
    taker = MaskBoard(SharedMemory.attach(memory.fd), 3, 70)
    assert taker.take() == []
    write(written, 2, 65_535, 1 << 20, 1, 2, 3)
    write(written, 0, 1, 0, 2, 3, 4)
    taken = {slot: (generation, position, mask.tolist()) for slot, generation, position, mask in taker.take()}
    assert taken == {0: (1, 0, [2, 3, 4]), 2: (65_535, 1 << 20, [1, 2, 3])}
    assert taker.take() == []
    write(written, 2, 65_535, (1 << 20) + 1, 6, 7, 8)
    ((slot, generation, position, mask),) = taker.take()
    assert (slot, generation, position, mask.tolist()) == (2, 65_535, (1 << 20) + 1, [6, 7, 8])


def test_a_row_that_is_being_written_is_left() -> None:
    board, _ = MaskBoard.create(slots=1, vocab_size=32)
    write(board, 0, 1, 7, 5)
    board.begin(0)
    assert board.take() == []
    board.publish(0, 1, 8)
    assert [position for _, _, position, _ in board.take()] == [8]


def test_sizes_and_heartbeat() -> None:
    assert [mask_words(vocab) for vocab in (1, 32, 33, 128_256)] == [1, 1, 2, 4008]
    board, memory = MaskBoard.create(slots=2, vocab_size=33)
    assert memory.size == MaskBoard.size(2, 33)
    assert (board.beats, board.computing) == (0, 0)
    board.beat(1)
    assert (board.beats, board.computing) == (1, 1)
    board.beat()
    assert (board.beats, board.computing) == (2, -1)
    last = MaskBoard(memory, 2, 33, process=MOST_PROCESSES - 1)
    last.beat(0)
    assert (last.beats, last.computing, board.beats, board.computing) == (1, 0, 2, -1)
    assert board.take() == [], "no heartbeat is taken for a tag"


KEYS = {(0, 1)}
"""What the observer wants: another generation of the slot is in the ring too."""


def test_an_observer_reads_beside_the_reader_and_notices_what_it_missed() -> None:
    rings = SharedRings(1)
    memory = SharedMemory.create("rings", rings.size)
    writer, reader, observer = rings.writer(memory), rings.reader(memory), rings.observer(memory)

    def write(count: int) -> None:
        for number in range(count):
            writer.write([number, number], [0, 0], [1, 2], [Finish.NONE, Finish.NONE])

    write(3)
    reader.read()
    observer.start()
    assert observer.read(KEYS) == []
    write(2)
    assert [record.token for record in observer.read(KEYS)] == [0, 1]
    assert [record.token for record in reader.read()] == [0, 0, 1, 1], "the observer has taken nothing"
    for _ in range(2):
        write(writer.room() // 2)
        reader.read()
    try:
        observer.read(KEYS)
    except OverflowError:
        observer.start()
    else:
        raise AssertionError("the ring went round twice, and the observer did not notice")
    write(1)
    assert [record.token for record in observer.read(KEYS)] == [0]
