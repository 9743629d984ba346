"""The loop of the mask process, with matchers whose masks take as long as a test wants."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import pytest

from baton.device.shared_memory import SharedMemory
from baton.engine.rings.layout import SharedRings
from baton.engine.rings.mask_board import Mask, MaskBoard, SlotMask, mask_words
from baton.engine.rings.output_ring import Finish
from baton.v1.masks_pb2 import CloseSequenceCommand, MaskCommand, OpenSequenceCommand
from baton.v1.types_pb2 import Grammar, Limits
from services.masks.frames import ProcessEnd, frame
from services.masks.process import MaskLoop
from tests.masks.model import VOCAB_SIZE

T = TypeVar("T")
SLOTS, WAIT_S = 4, 20.0
SLOW = "slow"


class FakeSequence:
    """Allows the token that was drawn last; the masks of a slow one wait for `release`."""

    def __init__(self, release: threading.Event | None) -> None:
        self._release = release
        self._token = 0
        self.computing = threading.Event()

    def advance(self, tokens: Sequence[int]) -> None:
        self._token = tokens[-1]

    def mask(self) -> Mask:
        if self._token and self._release is not None:
            self.computing.set()
            assert self._release.wait(WAIT_S)
        mask = np.zeros(mask_words(VOCAB_SIZE), dtype=np.uint32)
        mask[self._token // 32] = 1 << self._token % 32
        return mask


class FakeMatchers:
    def __init__(self) -> None:
        self.release = threading.Event()
        self.opened: list[FakeSequence] = []

    def open(self, grammar: Grammar, limits: Limits, output: Sequence[int]) -> FakeSequence:
        self.opened.append(FakeSequence(self.release if grammar.regex == SLOW else None))
        return self.opened[-1]


class Rig:
    """A loop in a thread, and what front and engine hold."""

    def __init__(self, mask_threads: int) -> None:
        rings = SharedRings(SLOTS)
        memory = SharedMemory.create("rings", rings.size)
        board, board_memory = MaskBoard.create(SLOTS, VOCAB_SIZE)
        self.front, process = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.front.settimeout(WAIT_S)
        self.matchers = FakeMatchers()
        self.ring, self._reader = rings.writer(memory), rings.reader(memory)
        self.board = MaskBoard(board_memory, SLOTS, VOCAB_SIZE)
        self._loop = MaskLoop(
            ProcessEnd(process),
            self.matchers,  # type: ignore[arg-type]
            rings.observer(memory),
            board,
            mask_threads,
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._loop.run()

    def follow(self, slot: int, generation: int, grammar: str) -> FakeSequence:
        """Opens a sequence whose first token has position 5, and awaits that it is followed."""
        opened = OpenSequenceCommand(
            grammar=Grammar(regex=grammar), follow=True, slot=slot, generation=generation, position=5
        )
        self.front.recv(1 << 16)  # what was answered before
        self.front.sendall(frame(MaskCommand(id=1, open=opened)))
        self.front.recv(1 << 16, socket.MSG_PEEK)
        return self.matchers.opened[-1]

    def close(self, slot: int, generation: int) -> None:
        closed = CloseSequenceCommand(slot=slot, generation=generation)
        self.front.sendall(frame(MaskCommand(close=closed)))

    def draw(self, slot: int, generation: int, token: int) -> None:
        self.ring.write([token], [slot], [generation], [Finish.NONE])
        self._reader.read()

    def next_mask(self) -> SlotMask:
        taken = until(self.board.take)
        (mask,) = taken
        return mask

    def stop(self) -> None:
        self.matchers.release.set()
        self.front.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def until(found: Callable[[], T]) -> T:
    """What `found` returns once it is true."""
    deadline = time.monotonic() + WAIT_S
    while not (result := found()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return result


@pytest.fixture
def rig() -> Iterator[Rig]:
    one = Rig(mask_threads=2)
    yield one
    one.stop()


def test_a_costly_mask_delays_no_other_sequence(rig: Rig) -> None:
    slow = rig.follow(0, 1, SLOW)
    rig.follow(1, 1, "cheap")
    rig.draw(0, 1, 7)
    assert slow.computing.wait(WAIT_S)
    for position in (6, 7, 8):
        rig.draw(1, 1, position)
        assert rig.next_mask()[:3] == (1, 1, position)
    assert rig.board.computing == 0, "the slot whose grammar is to blame if it takes too long"
    beats = rig.board.beats
    time.sleep(0.05)
    assert rig.board.beats == beats, "no progress while one and the same mask is the oldest"
    rig.matchers.release.set()
    assert rig.next_mask()[:3] == (0, 1, 6)
    until(lambda: rig.board.computing < 0)


def test_a_late_mask_does_not_replace_that_of_the_slots_next_sequence(rig: Rig) -> None:
    slow = rig.follow(0, 1, SLOW)
    rig.draw(0, 1, 7)
    assert slow.computing.wait(WAIT_S)
    rig.close(0, 1)
    rig.follow(0, 2, "cheap")
    rig.draw(0, 2, 9)
    slot, generation, position, mask = rig.next_mask()
    assert (slot, generation, position) == (0, 2, 6)
    rig.matchers.release.set()
    until(lambda: rig.board.computing < 0)
    assert rig.board.take() == [], "the mask of generation 1 was written"
    assert mask[0] == 1 << 9
