"""A line between two ends of one process, over the double of NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.device import nccl_line
from baton.device.nccl import Result
from baton.device.nccl_line import Ends, Moment, NcclLine, Stream
from tests.device.nccl_double import RECEIVER, SENDER, DoubleEnds, DoubleStream, NcclDouble

Pair = tuple[NcclDouble, NcclLine, NcclLine]


class Now:
    """A moment that is over."""

    def ended(self) -> bool:
        return True


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


def send(line: NcclLine, array: NDArray[np.uint8], after: Moment | None = None) -> None:
    line.send(array.ctypes.data, array.size, after or Now())


def receive(line: NcclLine, array: NDArray[np.uint8]) -> Moment:
    there = line.receive(array.ctypes.data, array.size)
    assert there is not None
    return there


def test_bytes_arrive_in_their_order_before_it_is_said(pair: Pair) -> None:
    _, sender, receiver = pair
    rng = np.random.default_rng(3)
    sent = [rng.integers(0, 256, size, dtype=np.uint8) for size in (10, 70_000, 333)]
    got = [np.zeros_like(each) for each in sent]
    moments = [receive(receiver, array) for array in got]
    assert not any(moment.ended() for moment in moments)
    for array in sent:
        send(sender, array)
    for number, moment in enumerate(moments):
        until(moment.ended)
        assert np.array_equal(got[number], sent[number])


def test_a_send_waits_for_its_moment_and_nobody_for_the_send(pair: Pair) -> None:
    class Late:
        there = False

        def ended(self) -> bool:
            return self.there

    _, sender, receiver = pair
    late, arrays = Late(), [np.full(100, n, dtype=np.uint8) for n in (1, 2)]
    got = [np.zeros_like(array) for array in arrays]
    begun = time.monotonic()
    send(sender, arrays[0], late)
    send(sender, arrays[1])
    moments = [receive(receiver, array) for array in got]
    assert time.monotonic() - begun < 1.0
    time.sleep(0.05)
    assert not any(moment.ended() for moment in moments)
    late.there = True
    until(moments[1].ended)
    assert [int(array[0]) for array in got] == [1, 2]


def test_a_receive_without_a_sender_ends_with_the_abort(pair: Pair) -> None:
    _, sender, receiver = pair
    there = receive(receiver, np.zeros(64, dtype=np.uint8))
    sender.abort()
    until(lambda: sender.over)
    time.sleep(0.05)
    assert receiver.broken is None  # NCCL does not say so
    assert not there.ended()
    freed = threading.Event()
    receiver.abort("its peer has gone", then=freed.set)
    until(lambda: receiver.over)
    assert freed.is_set()
    assert receiver.broken == "its peer has gone"
    assert not receiver.whole
    assert not receiver.overdue
    assert receiver.receive(0, 64) is None  # nothing is asked for any more


def test_an_abort_that_hangs_is_overdue_and_not_over(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_line, "OVERDUE_S", 0.1)
    library, _, receiver = pair
    receive(receiver, np.zeros(64, dtype=np.uint8))
    library.hangs.set()
    begun = time.monotonic()
    receiver.abort()
    assert time.monotonic() - begun < 0.1  # nobody waits for it
    until(lambda: receiver.overdue)
    assert not receiver.over
    library.hangs.clear()
    until(lambda: receiver.over)
    assert not receiver.overdue


def test_it_is_over_when_the_stream_has_come_to_its_end(pair: Pair) -> None:
    """An abort that has returned is not enough: kernels may still be on their way out."""
    _, _, receiver = pair
    works, freed = threading.Event(), threading.Event()
    stream = receiver._stream
    assert isinstance(stream, DoubleStream)
    stream.add(lambda: _wait(works))
    receiver.abort(then=freed.set)
    time.sleep(0.2)  # the double's abort takes a quarter of it
    assert not receiver.over
    assert not freed.is_set()
    works.set()
    until(lambda: receiver.over)
    assert freed.is_set()


def _wait(event: threading.Event) -> None:
    event.wait(5)


def test_a_communicator_that_fails_breaks_the_line(pair: Pair) -> None:
    library, sender, _ = pair
    library.fails = Result.REMOTE_ERROR
    until(lambda: sender.broken is not None)
    assert "remote_error" in str(sender.broken)
    assert not sender.over  # broken, and still to be ended


def test_who_is_not_met_is_given_up_at_once() -> None:
    """It has touched nobody's memory. The thread that waits for the peer goes when it is told."""
    library, freed = NcclDouble(), threading.Event()
    line = library.line(library.unique_id(), RECEIVER, lambda: None)
    time.sleep(0.05)
    assert not line.whole
    assert line.broken is None
    line.abort("it takes too long", then=freed.set)
    until(lambda: line.over)
    assert freed.is_set()
    assert line.broken == "it takes too long"
    until(lambda: not library.meeting)


def test_who_comes_too_late_is_sent_away() -> None:
    library, wait = NcclDouble(), threading.Event()
    name = library.unique_id()
    made: list[Ends] = []

    def meet(stream: Stream, given_up: Callable[[], bool]) -> Ends:
        made.append(library.meet(name, RECEIVER, lambda: False))
        wait.wait(5)
        return made[0]

    line = NcclLine(meet, DoubleStream(), SENDER, lambda: None)
    other = library.line(name, SENDER, lambda: None)
    until(lambda: bool(made))
    line.abort()
    until(lambda: line.over)  # though NCCL has not come back
    wait.set()
    until(lambda: made[0].aborted)  # type: ignore[attr-defined]
    assert not line.whole
    other.abort()
    until(lambda: other.over)


def test_a_library_that_refuses_at_once() -> None:
    woken = threading.Event()

    def refuse(stream: Stream, given_up: Callable[[], bool]) -> Ends:
        raise RuntimeError("no such device")

    line = NcclLine(refuse, DoubleStream(), 0, woken.set)
    until(lambda: line.broken is not None)
    assert "no such device" in str(line.broken)
    assert woken.is_set()
    line.abort()
    until(lambda: line.over)


def test_an_abort_waits_for_no_call_that_is_stuck(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's calls wait where the device does, for what the abort ends: whoever aborts must not wait too."""
    _, _, receiver = pair
    ends = receiver._ends
    assert isinstance(ends, DoubleEnds)
    under_way = threading.Event()

    def stuck(address: int, size: int, peer: int, stream: int) -> None:
        under_way.set()
        while not ends.aborted:
            time.sleep(1e-3)

    monkeypatch.setattr(ends, "receive", stuck)
    loop = threading.Thread(target=receiver.receive, args=(0, 64), daemon=True)
    loop.start()
    assert under_way.wait(5)
    begun = time.monotonic()
    receiver.abort("its peer has gone")
    assert time.monotonic() - begun < 0.1
    until(lambda: receiver.over)
    loop.join(5)
    assert not loop.is_alive()


def test_who_asks_when_it_is_over_is_told_at_once(pair: Pair) -> None:
    _, _, receiver = pair
    first, second = threading.Event(), threading.Event()
    receiver.abort(then=first.set)
    until(lambda: receiver.over)
    assert first.is_set()
    receiver.abort(then=second.set)
    assert second.wait(5)
