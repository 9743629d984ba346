"""Rings in shared memory: every message, once, in order; nothing that was tampered with."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from baton.device.shared_memory import SharedMemory
from kvtransfer.protocol.frames import MAX_COMMIT_BYTES, FrameError
from kvtransfer.transports.ipc.byte_ring import CAPACITY, RING_BYTES, RingReader, RingWriter

_HEADER = RING_BYTES - CAPACITY


class Ring:
    def __init__(self, bound: int = 1000) -> None:
        self.memory = SharedMemory.create("test-ring", RING_BYTES)
        self.writer = RingWriter(self.memory, 0, bound)
        self.reader = RingReader(self.memory, 0)

    def close(self) -> None:
        self.writer.close()
        self.reader.close()
        self.memory.drop_descriptor()
        self.memory.unmap()


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    made.close()


def test_messages_of_all_lengths_arrive_in_order_over_many_laps(ring: Ring) -> None:
    dice = random.Random(1)
    sent: list[bytes] = []
    received: list[bytes] = []
    total = 0
    while total < 8 * CAPACITY:
        message = dice.randbytes(dice.choice([1, 15, 16, 17, 48, 1000, 70_000, 300_000]))
        total += len(message)
        assert ring.writer.add(message)
        sent.append(message)
        for _ in range(dice.randrange(4)):
            if (taken := ring.reader.take()) is not None:
                received.append(taken)
            ring.writer.flush()
    while len(received) < len(sent):
        ring.writer.flush()
        if (taken := ring.reader.take()) is not None:
            received.append(taken)
    assert received == sent
    assert ring.reader.take() is None


def test_the_longest_commit_goes_through(ring: Ring) -> None:
    message = random.Random(2).randbytes(MAX_COMMIT_BYTES)
    assert ring.writer.add(message)
    taken = None
    while taken is None:
        taken = ring.reader.take()
        ring.writer.flush()
    assert taken == message


def test_a_reader_that_never_reads_is_noticed_and_takes_bounded_memory() -> None:
    ring = Ring(bound=3)
    message = bytes(CAPACITY // 4 - 16)
    assert all(ring.writer.add(message) for _ in range(4 + 3))
    assert not ring.writer.add(message)
    ring.close()


def test_doorbells_are_due_once_for_each_wait(ring: Ring) -> None:
    assert ring.reader.take() is None
    ring.writer.add(b"one")
    assert ring.writer.reader_idle()
    ring.writer.add(b"two")
    assert not ring.writer.reader_idle()
    assert not ring.reader.writer_blocked()
    for _ in range(5):
        ring.writer.add(bytes(CAPACITY // 4))
    for _ in range(4):
        assert not ring.reader.writer_blocked()
        ring.reader.take()
    assert ring.reader.writer_blocked()
    ring.writer.flush()
    assert not ring.reader.writer_blocked()


@pytest.mark.parametrize("at", range(16))
def test_a_changed_byte_of_a_record_is_noticed(ring: Ring, at: int) -> None:
    ring.writer.add(b"0123456789")
    for bit in (0, 7):
        ring.memory.bytes[_HEADER + at] ^= 1 << bit
    with pytest.raises(FrameError):
        ring.reader.take()


@pytest.mark.parametrize("at", range(10))
def test_a_changed_byte_of_a_message_is_noticed(ring: Ring, at: int) -> None:
    ring.writer.add(b"0123456789")
    ring.memory.bytes[_HEADER + 16 + at] ^= 4
    with pytest.raises(FrameError, match="is corrupt"):
        ring.reader.take()


@pytest.mark.parametrize("tail", [8, 31, CAPACITY + 16, (1 << 64) - 16])
def test_a_tail_that_no_writer_can_have_written_is_noticed(ring: Ring, tail: int) -> None:
    ring.writer.add(b"0123456789")
    ring.memory.region(0, 1, "<u8")[0] = tail
    with pytest.raises(FrameError):
        ring.reader.take()


def test_a_repeated_record_is_noticed(ring: Ring) -> None:
    """The record stands for bytes of an earlier lap that are taken for this one's."""
    ring.writer.add(b"0123456789")
    record = ring.memory.bytes[_HEADER : _HEADER + 32].copy()
    assert ring.reader.take() == b"0123456789"
    ring.memory.bytes[_HEADER + 32 : _HEADER + 64] = record
    ring.memory.region(0, 1, "<u8")[0] = 64
    with pytest.raises(FrameError, match="is corrupt"):
        ring.reader.take()


def test_memory_that_could_shrink_is_not_mapped() -> None:
    descriptor = os.memfd_create("test-unsealed", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 4096)
    with pytest.raises((ValueError, OSError)):
        SharedMemory.attach(descriptor)
    os.close(descriptor)
