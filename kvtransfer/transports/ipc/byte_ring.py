"""Messages from one process to another through memory that both map: bounded, in order, each once.

    tail u64 | head u64 | idle u64 | stuck u64      64 bytes apart: each has one writer but for `idle`
    CAPACITY bytes of records, round and round

    record:  length u32, its top bit set where the message goes on | crc u32 | number u64 | bytes

A record is padded to a multiple of 16 bytes.

`tail` counts the bytes ever published, `head` those ever read, so `tail - head` lie there. A record is
written behind `tail` and published by moving it, which is one store of 8 bytes: whoever sees the new tail
sees the record, and whatever was written before it. That holds for stores of a processor that makes them
visible in their order (`STORES_IN_ORDER`). Nothing that is read is believed: a record that lies beyond the
tail, is not the next one, or whose CRC differs is a `FrameError`.

A reader that finds nothing sets `idle`, and a writer that finds no room sets `stuck`: then the other has
to ring a bell. Both flags only save bells; one that is missed costs the poll's own interval.
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
# So long a message goes in one record; a longer one in several, so that it fits whatever its length.
_FRAGMENT = CAPACITY // 4
_LONGEST = MAX_COMMIT_BYTES + HEADER_BYTES


class _Ring:
    """One end's views of the memory; `close` lets go of them."""

    def __init__(self, memory: SharedMemory, offset: int) -> None:
        whole = memory.bytes[offset : offset + RING_BYTES].data
        self._words = whole[:_HEADER_BYTES].cast("Q")
        self._bytes = whole[_HEADER_BYTES:]
        self._position = 0
        self._number = 0

    def close(self) -> None:
        """Idempotent; no call but this one may follow."""
        self._words.release()
        self._bytes.release()


class RingWriter(_Ring):
    """What finds no room waits here, `bound` messages at most."""

    def __init__(self, memory: SharedMemory, offset: int, bound: int) -> None:
        super().__init__(memory, offset)
        self._bound = bound
        self._waiting: deque[memoryview] = deque()

    def add(self, message: bytes) -> bool:
        """Publishes a message, or lets it wait for room; False where too many wait already."""
        if len(self._waiting) >= self._bound:
            return False
        self._waiting.append(memoryview(message))
        self.flush()
        return True

    def flush(self) -> None:
        """Publishes what waits, as far as there is room."""
        while self._waiting:
            message = self._waiting[0]
            fragment = bytes(message[:_FRAGMENT])
            if not self._room(len(fragment)):
                self._words[_STUCK] = 1
                if not self._room(len(fragment)):  # the reader may have read meanwhile, and not seen the flag
                    return
            self._words[_STUCK] = 0
            self._write(fragment, goes_on=len(fragment) < len(message))
            if len(fragment) < len(message):
                self._waiting[0] = message[_FRAGMENT:]
            else:
                self._waiting.popleft()

    def reader_sleeps(self) -> bool:
        """Whether a bell is due: once for each time that the reader found nothing."""
        idle = self._words[_IDLE] != 0
        self._words[_IDLE] = 0
        return idle

    def _room(self, length: int) -> bool:
        return self._position + _padded(length) - self._words[_HEAD] <= CAPACITY

    def _write(self, fragment: bytes, goes_on: bool) -> None:
        length = len(fragment) | (_MORE if goes_on else 0)
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
    """Takes messages out."""

    def __init__(self, memory: SharedMemory, offset: int) -> None:
        super().__init__(memory, offset)
        self._begun = bytearray()
        self._words[_IDLE] = 1

    def take(self, *, sleeps: bool = True) -> bytes | None:
        """The next message, None where there is none yet; then a bell is wanted for the next, unless the
        reader does not sleep. Raises `FrameError`, after which nothing holds."""
        while self._there(sleeps):
            fragment, goes_on = self._read()
            if not goes_on and not self._begun:
                return fragment
            self._begun += fragment
            if len(self._begun) > _LONGEST:
                raise FrameError("a message without an end")
            if not goes_on:
                message, self._begun = bytes(self._begun), bytearray()
                return message
        return None

    def ask_for_bell(self) -> bool:
        """Before a reader sleeps that did not; whether there is something."""
        return self._there(sleeps=True)

    def writer_waits(self) -> bool:
        """Whether a bell is due: there is room again for a writer that had none."""
        return self._words[_STUCK] != 0 and self._words[_TAIL] - self._position <= CAPACITY // 2

    def _there(self, sleeps: bool) -> bool:
        if self._words[_TAIL] == self._position:
            if not sleeps:
                return False
            self._words[_IDLE] = 1
            if self._words[_TAIL] == self._position:  # else it came before the writer could see the flag
                return False
        self._words[_IDLE] = 0
        return True

    def _read(self) -> tuple[bytes, bool]:
        published = self._words[_TAIL] - self._position
        head = self._copy(self._position, _RECORD.size)
        marked, crc, number = _RECORD.unpack(head)
        length, goes_on = marked & ~_MORE, bool(marked & _MORE)
        if not (length <= _FRAGMENT and _padded(length) <= published <= CAPACITY):
            raise FrameError(f"a record of {length} bytes in {published} published")
        fragment = self._copy(self._position + _RECORD.size, length)
        if number != self._number or zlib.crc32(fragment, marked ^ number & 0xFFFFFFFF) != crc:
            raise FrameError(f"record {self._number} is not what was written")
        self._number += 1
        self._position += _padded(length)
        self._words[_HEAD] = self._position
        return fragment, goes_on

    def _copy(self, position: int, length: int) -> bytes:
        at = position % CAPACITY
        first = bytes(self._bytes[at : at + min(length, CAPACITY - at)])
        return first + bytes(self._bytes[: length - len(first)])


def _padded(length: int) -> int:
    """What a record of so many bytes takes; a multiple of 16, so that none's header is cut in two."""
    return _RECORD.size + (length + 15 & ~15)
