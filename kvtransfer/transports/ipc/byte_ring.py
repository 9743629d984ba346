"""Messages from one process to another through memory that both map: bounded, in order, each once.

    tail u64 | head u64 | idle u64 | stuck u64      64 bytes apart; all but `idle` have one writer
    CAPACITY bytes of records, wrapping around

    record:  length u32, its top bit set where the message continues | crc u32 | number u64 | bytes

A record is padded to a multiple of 16 bytes.

`tail` counts the bytes ever published, `head` those ever read, so the ring holds `tail - head`. A record is
written after `tail` and published by one store of 8 bytes to it: an observer of the new tail also sees the
record, and whatever was written before it. That holds on processors with ordered stores (`STORES_IN_ORDER`).
Nothing that is read is trusted: a record that lies beyond the tail, is not the next one, or whose CRC differs
is a `FrameError`.

A reader that finds nothing sets `idle`, and a writer that finds no room sets `stuck`: then the other end has
to ring the doorbell. Both flags only save doorbells; a missed one costs the interval of the loop's poll.
"""

from __future__ import annotations

import platform
import struct
import zlib
from collections import deque

from baton.device.shared_memory import SharedMemory
from kvtransfer.protocol.frames import HEADER_BYTES, MAX_COMMIT_BYTES, FrameError

STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64")

CAPACITY = 256 << 10
_APART = 64
_TAIL, _HEAD, _IDLE, _STUCK = (index * _APART // 8 for index in range(4))
_HEADER_BYTES = 4 * _APART
RING_BYTES = _HEADER_BYTES + CAPACITY

_RECORD = struct.Struct("<IIQ")
_MORE = 1 << 31
# A longer message is split into several records, so that it fits whatever its length.
_FRAGMENT = CAPACITY // 4
_LONGEST = MAX_COMMIT_BYTES + HEADER_BYTES


class _Ring:
    """One end's views of the memory."""

    def __init__(self, memory: SharedMemory, offset: int) -> None:
        whole = memory.bytes[offset : offset + RING_BYTES].data
        self._words = whole[:_HEADER_BYTES].cast("Q")
        self._bytes = whole[_HEADER_BYTES:]
        self._position = 0
        self._number = 0

    def close(self) -> None:
        """Releases the views; no other call may follow. Idempotent."""
        self._words.release()
        self._bytes.release()


class RingWriter(_Ring):
    """Queues what finds no room, at most `bound` messages."""

    def __init__(self, memory: SharedMemory, offset: int, bound: int) -> None:
        super().__init__(memory, offset)
        self._bound = bound
        self._queued: deque[memoryview] = deque()

    def add(self, message: bytes) -> bool:
        """Publishes or queues a message; False where too many are queued already."""
        if len(self._queued) >= self._bound:
            return False
        self._queued.append(memoryview(message))
        self.flush()
        return True

    def flush(self) -> None:
        """Publishes queued messages, as far as there is room."""
        while self._queued:
            message = self._queued[0]
            fragment = bytes(message[:_FRAGMENT])
            if not self._room(len(fragment)):
                self._words[_STUCK] = 1
                if not self._room(len(fragment)):  # the reader may have read before it could see the flag
                    return
            self._words[_STUCK] = 0
            self._write(fragment, continues=len(fragment) < len(message))
            if len(fragment) < len(message):
                self._queued[0] = message[_FRAGMENT:]
            else:
                self._queued.popleft()

    def reader_idle(self) -> bool:
        """True if a doorbell is due: once for each time that the reader found nothing."""
        idle = self._words[_IDLE] != 0
        self._words[_IDLE] = 0
        return idle

    def _room(self, length: int) -> bool:
        return self._position + _padded(length) - self._words[_HEAD] <= CAPACITY

    def _write(self, fragment: bytes, continues: bool) -> None:
        length = len(fragment) | (_MORE if continues else 0)
        crc = zlib.crc32(fragment, length ^ self._number & 0xFFFFFFFF)
        record = _RECORD.pack(length, crc, self._number) + fragment
        at = self._position % CAPACITY
        first = min(len(record), CAPACITY - at)
        self._bytes[at : at + first] = record[:first]
        self._bytes[: len(record) - first] = record[first:]
        self._number += 1
        self._position += _padded(len(fragment))
        self._words[_TAIL] = self._position


class RingReader(_Ring):
    """Reads the messages of a ring in order."""

    def __init__(self, memory: SharedMemory, offset: int) -> None:
        super().__init__(memory, offset)
        self._partial = bytearray()
        self._words[_IDLE] = 1

    def take(self, *, sleeps: bool = True) -> bytes | None:
        """The next message, or None; then the next one rings the doorbell, unless the reader does not sleep.
        FrameError, after which the ring cannot be used."""
        while self._there(sleeps):
            fragment, continues = self._read()
            if not continues and not self._partial:
                return fragment
            self._partial += fragment
            if len(self._partial) > _LONGEST:
                raise FrameError("a message is too long")
            if not continues:
                message, self._partial = bytes(self._partial), bytearray()
                return message
        return None

    def arm_doorbell(self) -> bool:
        """Requests a doorbell for the next message, if there is none; returns True if there is one."""
        return self._there(sleeps=True)

    def writer_blocked(self) -> bool:
        """True if a doorbell is due: there is room again for a writer that found none."""
        return self._words[_STUCK] != 0 and self._words[_TAIL] - self._position <= CAPACITY // 2

    def _there(self, sleeps: bool) -> bool:
        if self._words[_TAIL] == self._position:
            if not sleeps:
                return False
            self._words[_IDLE] = 1
            if (
                self._words[_TAIL] == self._position
            ):  # else it was published before the writer could see the flag
                return False
        self._words[_IDLE] = 0
        return True

    def _read(self) -> tuple[bytes, bool]:
        published = self._words[_TAIL] - self._position
        head = self._copy(self._position, _RECORD.size)
        marked, crc, number = _RECORD.unpack(head)
        length, continues = marked & ~_MORE, bool(marked & _MORE)
        if not (length <= _FRAGMENT and _padded(length) <= published <= CAPACITY):
            raise FrameError(f"a record of {length} bytes in {published} published")
        fragment = self._copy(self._position + _RECORD.size, length)
        if number != self._number or zlib.crc32(fragment, marked ^ number & 0xFFFFFFFF) != crc:
            raise FrameError(f"record {self._number} is corrupt")
        self._number += 1
        self._position += _padded(length)
        self._words[_HEAD] = self._position
        return fragment, continues

    def _copy(self, position: int, length: int) -> bytes:
        at = position % CAPACITY
        first = bytes(self._bytes[at : at + min(length, CAPACITY - at)])
        return first + bytes(self._bytes[: length - len(first)])


def _padded(length: int) -> int:
    """The bytes that a record with `length` bytes of message occupies: a multiple of 16, so that no header
    wraps around."""
    return _RECORD.size + (length + 15 & ~15)
