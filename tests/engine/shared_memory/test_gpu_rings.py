"""The output ring between two processes: a reader a lap behind never sees a torn or stale word.

What is injected: the reader reads only when the producer is all but a whole ring ahead of it, so that what
it reads is about to be written over. On a CPU the producer counts; on a GPU it is the graph.
"""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from baton.device.shared_memory import SharedMemory
from baton.engine.sequence import SamplingParams
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.output_ring import Finish
from bench.engine_driver import decode_step
from tests.engine.local_engine import LocalEngine, Start
from tests.engine.shared_memory.ring_checker import Checker, Found, numbered

DEADLINE_S = 200.0


class Reader:
    """The other process, which reads the rings."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        assert process.stdout is not None
        self._fd = process.stdout.fileno()
        self._rest = b""

    def lines(self, wait_s: float = 0.0) -> list[str]:
        """Whole lines that it has printed since the last call; waits `wait_s` for the first."""
        until = time.monotonic() + wait_s
        while select.select([self._fd], [], [], max(0.0, until - time.monotonic()))[0]:
            read = os.read(self._fd, 1 << 16)
            self._rest += read
            if b"\n" in read or not read:
                break
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode() for line in lines]

    def found(self) -> Found:
        """Lets it read to the end; what it has found."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        lines: list[str] = []
        until = time.monotonic() + DEADLINE_S
        while not any(line.startswith("{") for line in lines):
            assert time.monotonic() < until, "the reader does not come to the end"
            lines += self.lines(0.1)
        return Found(**json.loads(lines[-1]))


@contextmanager
def reading(
    memory: SharedMemory, rings: SharedRings, tokens: list[int] | None, behind: int
) -> Iterator[Reader]:
    numbers = [str(n) for n in (memory.fd, rings.slots, rings.max_logprobs, behind)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.engine.shared_memory.ring_checker", *numbers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(memory.fd,),
    ) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(tokens).encode() + b"\n")
            process.stdin.flush()
            reader = Reader(process)
            assert reader.lines(DEADLINE_S) == ["reading"]
            yield reader
        finally:
            process.kill()


def write_numbered(memory: SharedMemory, rings: SharedRings, words: int) -> int:
    """Writes `words` words as fast as there is room; returns how often there was none."""
    writer, written, waits = rings.writer(memory), 0, 0
    until = time.monotonic() + DEADLINE_S
    while written < words:
        room = min(writer.room(), 97, words - written)
        if not room:
            waits += 1
            assert time.monotonic() < until
            os.sched_yield()
            continue
        made = [numbered(n) for n in range(written, written + room)]
        writer.write(
            [one.token for one in made],
            [one.slot for one in made],
            [one.generation for one in made],
            [one.finish for one in made],
        )
        written += room
    return waits


def prove_numbered(words: int) -> str:
    rings = SharedRings(2, 0)
    memory = SharedMemory.create("test-two-processes", rings.size)
    with reading(memory, rings, None, behind=rings.ring_words - 8) as reader:
        waits = write_numbered(memory, rings, words)
        found = reader.found()
    laps = words // rings.ring_words
    assert (found.words, found.wrong) == (words, 0)
    assert waits > 0, "the ring was never full"
    assert found.behind > words // 2
    assert laps > 2 * 255, "the laps' numbers have not come round"
    return f"{words} words, {laps} laps, {found.behind} read a lap behind, {waits} waits for room, 0 wrong"


def test_a_word_that_is_not_what_it_should_be_is_found() -> None:
    rings = SharedRings(2, 0)
    memory = SharedMemory.create("test-checker", rings.size)
    writer, counting = rings.writer(memory), Checker(rings.reader(memory), None, 0)
    for position in range(20):
        word = numbered(position + (position == 7))
        writer.write([word.token], [word.slot], [word.generation], [word.finish])
    assert counting.turn(random.Random(1))
    assert (counting.found.words, counting.found.wrong) == (20, 1)
    other = SharedMemory.create("test-checker", rings.size)
    writer, following = rings.writer(other), Checker(rings.reader(other), [4, 5, 6], 0)
    for generation, tokens in ((1, (4, 5, 6)), (3, (4, 5, 6)), (3, (4, 6, 6))):
        finishes = (Finish.NONE, Finish.NONE, Finish.LENGTH)
        writer.write(tokens, [1] * 3, [generation] * 3, finishes)
    assert following.turn(random.Random(1))
    assert (following.found.ended, following.found.wrong) == (3, 3 + 1), "a generation skipped, and a token"


def test_a_reader_a_lap_behind_in_another_process() -> None:
    print(prove_numbered(70_000))


@pytest.mark.slow
def test_millions_of_words_between_two_processes() -> None:
    print(f"\nPROOF ring, two processes: {prove_numbered(3_000_000)}")


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.slow
def test_millions_of_words_that_the_graph_writes(tmp_path: Path) -> None:
    slots, count, rounds = 128, 500, 40
    assert torch.cuda.is_available()
    start = Start((5, 6, 7), max_tokens=count, sampling=SamplingParams(1.0, seed=9))
    fields = {"block_tokens": 16, "device": "cuda", "graph": True, "longest": count + 16}
    one = LocalEngine(tmp_path / "model", slots=1, blocks=80, **fields)  # type: ignore[arg-type]
    (tokens,) = one.run(*one.start_many([start]))
    assert len(set(tokens)) > 20
    engine = LocalEngine(tmp_path / "model", slots=slots, blocks=1 + 64 * slots, **fields)  # type: ignore[arg-type]
    rings = SharedRings(slots)
    with reading(engine.memory, rings, tokens, behind=rings.ring_words - 3 * slots) as reader:
        drive(engine, reader, start, rounds * slots)
        found = reader.found()
    words = rounds * slots * count
    assert (found.words, found.ended, found.wrong) == (words, rounds * slots, 0)
    assert found.behind > words // 2
    assert engine.reader.full_steps > 0, "the ring was never full"
    assert engine.slots.free == slots
    assert engine.pools.free == engine.pools.total
    laps = words // rings.ring_words
    assert laps > 255
    print(
        f"\nPROOF ring, graph to another process: {words} words, {laps} laps, {found.behind} read a lap"
        f" behind, {engine.reader.full_steps} full steps, 0 wrong"
    )


def drive(engine: LocalEngine, reader: Reader, start: Start, requests: int) -> None:
    """Keeps every slot busy until `requests` requests have ended, as the other process reports them."""
    ended = started = 0
    until = time.monotonic() + DEADLINE_S
    while ended < requests:
        assert time.monotonic() < until, f"{ended} of {requests} have ended"
        if engine.slots.free and started < requests:
            keys = engine.start_many([start] * min(engine.slots.free, requests - started))
            started += len(keys)
        decode_step(engine.decode)
        for line in reader.lines():
            slot, generation = map(int, line.split())
            engine.slots.release(slot, generation)
            engine.pools.release(engine.tables.pop((slot, generation)))
            ended += 1
