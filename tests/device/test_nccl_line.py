"""A line between two ends of one process, over the double of NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.device import nccl_line
from baton.device.nccl import Result
from baton.device.nccl_line import Job, NcclLine, Way
from tests.device.nccl_double import RECEIVER, SENDER, DoubleStream, NcclDouble

Pair = tuple[NcclDouble, NcclLine, NcclLine]


def until(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.001)


@pytest.fixture
def pair() -> Iterator[Pair]:
    library, name = NcclDouble(), NcclDouble().unique_id()
    lines = [library.line(name, rank, lambda: None) for rank in (SENDER, RECEIVER)]
    until(lambda: all(line.whole for line in lines))
    yield library, lines[0], lines[1]
    library.hangs.clear()
    for line in lines:
        line.abort()
    until(lambda: all(line.over for line in lines))


def _out(array: NDArray[np.uint8], issued: Callable[[], None] | None = None) -> Job:
    return Job(Way.OUT, array.ctypes.data, array.size, issued=issued)


def _in(array: NDArray[np.uint8], ended: Callable[[], None] | None = None) -> Job:
    return Job(Way.IN, array.ctypes.data, array.size, ended=ended)


def test_bytes_arrive_in_their_order_before_it_is_said(pair: Pair) -> None:
    _, sender, receiver = pair
    rng = np.random.default_rng(3)
    sent = [rng.integers(0, 256, size, dtype=np.uint8) for size in (1, 70_000, 333)]
    got = [np.zeros_like(each) for each in sent]
    said: list[int] = []

    def arrived(number: int) -> None:
        assert np.array_equal(got[number], sent[number])
        said.append(number)

    for number, array in enumerate(got):
        receiver.add(_in(array, lambda number=number: arrived(number)))  # type: ignore[misc]
    for array in sent:
        sender.add(_out(array))
    until(lambda: said == [0, 1, 2])


def test_what_is_issued_needs_nobody_any_more(pair: Pair) -> None:
    """A send is issued while nobody receives; what is said behind it comes behind it."""
    _, sender, receiver = pair
    said: list[str] = []
    array = np.full(100, 7, dtype=np.uint8)
    sender.add(_out(array, lambda: said.append("bytes")))
    sender.add(Job(Way.OUT, issued=lambda: said.append("word")))
    until(lambda: said == ["bytes", "word"])
    got = np.zeros_like(array)
    receiver.add(_in(got, lambda: said.append("arrived")))
    until(lambda: said[-1] == "arrived")
    assert (got == 7).all()


def test_a_job_that_waits_for_its_moment_holds_up_no_other(pair: Pair) -> None:
    """Both sends are handed over; each is called issued when its own moment has ended, in their order."""

    class Late:
        there = False

        def ended(self) -> bool:
            return self.there

    _, sender, receiver = pair
    said: list[str] = []
    moments = Late(), Late()
    arrays = [np.full(100, n, dtype=np.uint8) for n in (1, 2)]
    got = [np.zeros_like(array) for array in arrays]
    for number, array in enumerate(arrays):
        issued, arrived = partial(said.append, f"issued {number}"), partial(said.append, f"arrived {number}")
        sender.add(Job(Way.OUT, array.ctypes.data, array.size, moments[number], issued))
        receiver.add(_in(got[number], arrived))
    until(lambda: not sender._jobs)
    moments[1].there = True
    time.sleep(0.05)
    assert said == []
    moments[0].there = True
    until(lambda: len(said) == 4)
    assert said.index("issued 0") < said.index("issued 1")
    assert [int(array[0]) for array in got] == [1, 2]


def test_a_receive_without_a_sender_ends_with_the_abort(pair: Pair) -> None:
    _, sender, receiver = pair
    ended: list[bool] = []
    receiver.add(_in(np.zeros(64, dtype=np.uint8), lambda: ended.append(True)))
    sender.abort()
    until(lambda: sender.over)
    time.sleep(0.05)
    assert receiver.broken is None  # NCCL does not say so
    assert not ended
    receiver.abort("its peer has gone")
    until(lambda: receiver.over)
    assert receiver.broken == "its peer has gone"
    assert not receiver.whole
    assert not ended
    assert not receiver.overdue


def test_an_abort_that_hangs_is_overdue_and_not_over(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_line, "OVERDUE_S", 0.1)
    library, _, receiver = pair
    receiver.add(_in(np.zeros(64, dtype=np.uint8)))
    library.hangs.set()
    begun = time.monotonic()
    receiver.abort()
    assert time.monotonic() - begun < 0.1  # nobody waits for it
    until(lambda: receiver.overdue)
    assert not receiver.over
    library.hangs.clear()
    until(lambda: receiver.over)
    assert not receiver.overdue


def _wait(event: threading.Event) -> None:
    event.wait(5)


def test_it_is_over_when_the_stream_has_come_to_its_end() -> None:
    """An abort that has returned is not enough: kernels may still be on their way out."""
    library, stream, works = NcclDouble(), DoubleStream(), threading.Event()
    freed = threading.Event()
    line = NcclLine(lambda: library.begin(library.unique_id(), RECEIVER), stream, SENDER, lambda: None, 1.0)
    stream.add(lambda: _wait(works))
    line.abort(then=freed.set)
    time.sleep(0.2)  # the double's abort takes a quarter of it
    assert not line.over
    assert not freed.is_set()
    works.set()
    until(lambda: line.over)
    assert freed.is_set()


def test_a_communicator_that_fails_breaks_the_line(pair: Pair) -> None:
    library, sender, _ = pair
    library.fails = Result.REMOTE_ERROR
    sender.add(_out(np.zeros(5, dtype=np.uint8)))
    until(lambda: sender.broken is not None)
    assert "remote_error" in str(sender.broken)
    assert not sender.over  # broken, and still to be ended


def test_nobody_comes() -> None:
    woken = threading.Event()
    line = NcclDouble().line(NcclDouble().unique_id(), RECEIVER, woken.set, connect_s=0.1)
    until(lambda: line.broken is not None)
    assert "not done within 0.1 s" in str(line.broken)
    assert woken.is_set()
    line.abort()
    until(lambda: line.over)


def test_a_library_that_refuses_at_once() -> None:
    def refuse() -> nccl_line.Ends:
        raise RuntimeError("no such device")

    line = NcclLine(refuse, DoubleStream(), 0, lambda: None, 1.0)
    until(lambda: line.broken is not None)
    assert "no such device" in str(line.broken)
    line.abort()
    until(lambda: line.over)
