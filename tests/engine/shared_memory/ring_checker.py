"""A reader of an output ring in a process of its own, that stays behind and checks every word.

    python -m tests.engine.shared_memory.ring_checker FD SLOTS LOGPROBS BEHIND

On standard input: tokens of a sequence

Each generation of each slot has to emit just these tokens, the last with a finish, and generations have to
follow each other. It reads some words only when the producer is BEHIND words ahead, or nothing comes for a
while. It prints a line for each slot that ended, `SLOT GENERATION`, and, when standard input ends, what it
has found, as JSON. With nothing on standard input the words are numbered, see `numbered`.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.output_ring import (
    GENERATIONS,
    LAPS,
    MAX_SLOTS,
    MAX_VOCAB,
    Finish,
    Record,
    RingReader,
)

_IDLE_S = 0.02
_MOST_PRINTED = 5


@dataclass
class Found:
    """`behind`: words read while the producer was that far ahead."""

    words: int = 0
    behind: int = 0
    ended: int = 0
    wrong: int = 0


def numbered(position: int) -> Record:
    """The word of a ring position, where the producer counts."""
    return Record(position % MAX_SLOTS, position * 7 % GENERATIONS, position * 131 % MAX_VOCAB, Finish.NONE)


class Checker:
    """`tokens` None: the words are numbered."""

    def __init__(self, reader: RingReader, tokens: list[int] | None, behind: int) -> None:
        self._reader = reader
        self._tokens = tokens
        self._behind = behind
        self._sequences: dict[int, tuple[int, int]] = {}  # by slot: generation, tokens of it read
        self.found = Found()

    def turn(self, draw: random.Random) -> bool:
        """Waits a little for the producer to be ahead, and reads some; False where there was nothing."""
        until = time.monotonic() + _IDLE_S
        while not (ahead := self._is_ahead()) and time.monotonic() < until:
            os.sched_yield()
        records = self._reader.read(draw.randint(1, 200))
        self.found.behind += len(records) if ahead else 0
        check: Callable[[Record], bool] = self._is_numbered if self._tokens is None else self._is_expected
        for record in records:
            if not check(record):
                self.found.wrong += 1
                if self.found.wrong <= _MOST_PRINTED:
                    print(f"word {self.found.words}: {record}", file=sys.stderr, flush=True)
            self.found.words += 1
        return bool(records)

    def _is_ahead(self) -> bool:
        position = self._reader.tail + self._behind
        lap, index = divmod(position, self._reader.capacity)
        return int(self._reader.words[index]) >> 56 == lap % LAPS + 1

    def _is_numbered(self, record: Record) -> bool:
        return record == numbered(self.found.words)

    def _is_expected(self, record: Record) -> bool:
        assert self._tokens is not None
        generation, read = self._sequences.get(record.slot, (1, 0))
        last = read == len(self._tokens) - 1
        expected = Record(
            record.slot, generation, self._tokens[read], Finish.LENGTH if last else Finish.NONE, None
        )
        self._sequences[record.slot] = ((generation + 1) % GENERATIONS, 0) if last else (generation, read + 1)
        if last:
            self.found.ended += 1
            print(record.slot, record.generation, flush=True)
        return record == expected


def main() -> None:
    fd, slots, logprobs, behind = map(int, sys.argv[1:])
    line = sys.stdin.readline()
    reader = SharedRings(slots, logprobs).reader(SharedMemory.attach(fd))
    checker = Checker(reader, json.loads(line), behind)
    print("reading", flush=True)
    draw = random.Random(1)
    while checker.turn(draw) or not select.select([sys.stdin], [], [], 0)[0]:
        pass
    print(json.dumps(asdict(checker.found)), flush=True)


if __name__ == "__main__":
    main()
