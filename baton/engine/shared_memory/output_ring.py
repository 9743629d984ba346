"""The output ring: how tokens leave the decode loop without passing an interpreter.

Single producer (a step's last node), single consumer (the worker's front, another process). A word is 8
bytes, written by one store and valid by its own lap, so there is no head to publish and nothing to fence:

    bits  0-23 token   24-35 slot   36-51 generation   52-55 finish   56-63 lap

The lap of position n is n // capacity mod 255 + 1; zeroed memory holds no valid word. The reader
publishes its tail; the producer, finding no room, writes nothing and counts a full step: it never
overwrites and never waits. What does not fit a word is in `logprob_records`, at the word's index.
Torch-free; both processes import it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from enum import IntEnum
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.logprob_records import LogprobBatch, LogprobRecords, Logprobs

MAX_VOCAB = 1 << 24
MAX_SLOTS = 1 << 12
GENERATIONS = 1 << 16
LAPS = 255
# Words that the reader looks at together.
_RUN = 64
# Words after which an observer returns, though there are more.
_MOST_OBSERVED = 4096
# Tail, steps, full steps, held rows, each on a cache line of its own; then one that a GPU's step
# writes for its host: status, tokens, head, rows.
RING_HEADER_BYTES = 320
_CACHE_LINE = 64


class Finish(IntEnum):
    """The reason why a slot ended; the values are those of `baton.v1.FinishReason`. The last two carry no
    token."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    PREEMPTED = 4


_FINISHES = tuple(Finish)


class Record(NamedTuple):
    """A decoded word of the ring, with the logprobs of its token where they were asked for."""

    slot: int
    generation: int
    token: int
    finish: Finish
    logprobs: Logprobs | None = None

    @property
    def has_token(self) -> bool:
        return self.finish not in (Finish.CANCELLED, Finish.PREEMPTED)


def ring_bytes(capacity: int) -> int:
    """Shared memory that a ring of `capacity` words takes."""
    return RING_HEADER_BYTES + 8 * capacity


class _Ring:
    def __init__(
        self, memory: SharedMemory, offset: int, capacity: int, records: LogprobRecords | None = None
    ) -> None:
        if capacity & (capacity - 1):
            raise ValueError("a ring's capacity is a power of two")
        self.capacity = capacity
        self._records = records
        self._next = 0  # number of the word that this end writes or reads next
        lines = memory.region(offset, RING_HEADER_BYTES // 8, np.uint64).reshape(-1, _CACHE_LINE // 8)
        self._tail, self._steps, self._full, self._held, self.device_counters = lines
        self.words: npt.NDArray[np.uint64] = memory.region(offset + RING_HEADER_BYTES, capacity, np.uint64)

    def _valid_words(self, limit: int) -> list[int]:
        """The next words that stand, at most `limit`, none beyond the ring's end."""
        lap, index = divmod(self._next, self.capacity)
        words: list[int] = self.words[index : index + limit].tolist()
        lap = lap % LAPS + 1
        return list(takewhile(lambda word: word >> 56 == lap, words))

    @property
    def steps(self) -> int:
        """Number of steps that ran."""
        return int(self._steps[0])

    @property
    def tail(self) -> int:
        """Words that the reader has taken."""
        return int(self._tail[0])

    @property
    def full_steps(self) -> int:
        """Steps that advanced no slot because the reader was behind."""
        return int(self._full[0])

    @property
    def stalled_rows(self) -> int:
        """Rows that ran without advancing."""
        return int(self._held[0])


class RingWriter(_Ring):
    """The producer's end of the ring."""

    def room(self) -> int:
        return self.capacity - (self._next - self.tail)

    def count_step(self) -> None:
        self._steps[0] += np.uint64(1)

    def count_full(self) -> None:
        self._full[0] += np.uint64(1)

    def count_held(self, rows: int) -> None:
        self._held[0] += np.uint64(rows)

    def write(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        generations: Sequence[int],
        finishes: Sequence[int],
        logprobs: LogprobBatch | None = None,
    ) -> None:
        """Appends one word an element, in order. The caller has checked `room`.

        `logprobs` has records for some of the elements; a ring without an array for them refuses it.
        """
        if len(tokens) > self.room():
            raise RuntimeError("the output ring would overrun its reader")
        positions = np.arange(self._next, self._next + len(tokens), dtype=np.uint64)
        laps = positions // np.uint64(self.capacity) % np.uint64(LAPS) + np.uint64(1)
        words = np.asarray(tokens, dtype=np.uint64)
        for field, shift in ((slots, 24), (generations, 36), (finishes, 52), (laps, 56)):
            words = words | (np.asarray(field, dtype=np.uint64) << np.uint64(shift))
        if logprobs is not None:
            if self._records is None:
                raise ValueError("this ring carries no logprobs")
            self._records.write(positions[logprobs.rows], logprobs)
        self.words[positions % np.uint64(self.capacity)] = words
        self._next += len(tokens)


class RingReader(_Ring):
    """The consumer's end of the ring."""

    def read(self, limit: int = 4096) -> list[Record]:
        """Takes up to `limit` valid words, in order, and publishes the new tail."""
        records: list[Record] = []
        while len(records) < limit and (words := self._valid_words(min(_RUN, limit - len(records)))):
            for position, word in enumerate(words, self._next):
                logprobs = None if self._records is None else self._records.read(position)
                records.append(_decode(word, logprobs))
            self._next += len(words)
        if records:
            self._tail[0] = self._next
        return records


class RingObserver(_Ring):
    """A second reader, which the producer does not wait for."""

    def start(self) -> None:
        """Continues with the first word that the ring's reader has not taken."""
        self._next = self.tail

    def read(self, wanted: Container[tuple[int, int]]) -> list[Record]:
        """The next valid words, of them those of the `wanted` (slot, generation), without logprobs. Raises
        OverflowError where the producer has overwritten some words."""
        records: list[Record] = []
        behind = self._next + _MOST_OBSERVED
        while self._next < behind and (words := self._valid_words(_RUN)):
            records += [_decode(word, None) for word in words if _sequence_of(word) in wanted]
            self._next += len(words)
        # The producer is never more than the ring's capacity ahead of the reader's tail.
        if self.tail > self._next and not self._valid_words(1):
            raise OverflowError("the ring was overwritten")
        return records


def _sequence_of(word: int) -> tuple[int, int]:
    """Slot and generation in a word."""
    return word >> 24 & 0xFFF, word >> 36 & 0xFFFF


def _decode(word: int, logprobs: Logprobs | None) -> Record:
    slot, generation = _sequence_of(word)
    return Record(
        slot=slot,
        generation=generation,
        token=word & 0xFFFFFF,
        finish=_FINISHES[word >> 52 & 0xF],
        logprobs=logprobs,
    )
