"""A channel between two ends of one process, over the double of NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.device.nccl import nccl_channel
from baton.device.nccl.nccl_channel import NcclChannel, PairCommunicator
from baton.device.nccl.nccl_library import Result
from baton.device.streams.stream import Event, Stream
from tests.device.nccl.nccl_double import RECEIVER, SENDER, DoubleStream, NcclDouble
from tests.support.events import FakeEvent
from tests.support.waiting import block_until

Pair = tuple[NcclDouble, NcclChannel, NcclChannel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    library, name = NcclDouble(), NcclDouble().unique_id()
    channels = [library.channel(name, rank, lambda: None) for rank in (SENDER, RECEIVER)]
    block_until(lambda: all(channel.connected for channel in channels))
    yield library, channels[0], channels[1]
    library.hangs.clear()
    for channel in channels:
        channel.abort()
    block_until(lambda: all(channel.terminated for channel in channels))


def send(channel: NcclChannel, array: NDArray[np.uint8], after: Event | None = None) -> None:
    channel.send(array.ctypes.data, array.size, after or FakeEvent(complete=True))


def receive(channel: NcclChannel, array: NDArray[np.uint8]) -> Event:
    there = channel.receive(array.ctypes.data, array.size)
    assert there is not None
    return there


def test_bytes_arrive_in_order_before_the_event_completes(pair: Pair) -> None:
    _, sender, receiver = pair
    rng = np.random.default_rng(3)
    sent = [rng.integers(0, 256, size, dtype=np.uint8) for size in (10, 70_000, 333)]
    got = [np.zeros_like(each) for each in sent]
    events = [receive(receiver, array) for array in got]
    assert not any(event.query() for event in events)
    for array in sent:
        send(sender, array)
    for number, event in enumerate(events):
        block_until(event.query)
        assert np.array_equal(got[number], sent[number])


def test_a_send_waits_for_its_event_and_its_caller_for_nothing(pair: Pair) -> None:
    _, sender, receiver = pair
    late, arrays = FakeEvent(), [np.full(100, n, dtype=np.uint8) for n in (1, 2)]
    got = [np.zeros_like(array) for array in arrays]
    begun = time.monotonic()
    send(sender, arrays[0], late)
    send(sender, arrays[1])
    events = [receive(receiver, array) for array in got]
    assert time.monotonic() - begun < 1.0
    time.sleep(0.05)
    assert not any(event.query() for event in events)
    late.complete = True
    block_until(events[1].query)
    assert [int(array[0]) for array in got] == [1, 2]


def test_a_receive_without_a_sender_ends_with_the_abort(pair: Pair) -> None:
    _, sender, receiver = pair
    there = receive(receiver, np.zeros(64, dtype=np.uint8))
    sender.abort()
    block_until(lambda: sender.terminated)
    time.sleep(0.05)
    assert receiver.failure is None  # NCCL does not report it
    assert not there.query()
    freed = threading.Event()
    receiver.abort("its peer has gone", then=freed.set)
    block_until(lambda: receiver.terminated)
    assert freed.is_set()
    assert receiver.failure == "its peer has gone"
    assert not receiver.connected
    assert not receiver.hung
    assert receiver.receive(0, 64) is None  # nothing is asked for any more


def test_an_abort_that_hangs_is_hung_and_not_terminated(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_channel, "ABORT_TIMEOUT_S", 0.1)
    library, _, receiver = pair
    receive(receiver, np.zeros(64, dtype=np.uint8))
    library.hangs.set()
    begun = time.monotonic()
    receiver.abort()
    assert time.monotonic() - begun < 0.1  # its caller does not wait
    block_until(lambda: receiver.hung)
    assert not receiver.terminated
    library.hangs.clear()
    block_until(lambda: receiver.terminated)
    assert not receiver.hung


def test_it_has_terminated_when_the_stream_has_finished(pair: Pair) -> None:
    """An abort that has returned is not enough: kernels may still be on their way out."""
    library, _, receiver = pair
    works, freed = threading.Event(), threading.Event()
    library.streams[RECEIVER].add(lambda: _wait(works))
    receiver.abort(then=freed.set)
    time.sleep(0.2)  # the double's abort takes a quarter of it
    assert not receiver.terminated
    assert not freed.is_set()
    works.set()
    block_until(lambda: receiver.terminated)
    assert freed.is_set()


def _wait(event: threading.Event) -> None:
    event.wait(5)


def test_a_communicator_that_fails_fails_the_channel(pair: Pair) -> None:
    library, sender, _ = pair
    library.fails = Result.REMOTE_ERROR
    block_until(lambda: sender.failure is not None)
    assert "remote_error" in str(sender.failure)
    assert not sender.terminated  # broken, and still to be ended


def test_an_end_that_never_connected_terminates_at_once() -> None:
    """The end has accessed no memory. The thread that waits for the peer ends when notified."""
    library, freed = NcclDouble(), threading.Event()
    channel = library.channel(library.unique_id(), RECEIVER, lambda: None)
    time.sleep(0.05)
    assert not channel.connected
    assert channel.failure is None
    channel.abort("it takes too long", then=freed.set)
    block_until(lambda: channel.terminated)
    assert freed.is_set()
    assert channel.failure == "it takes too long"
    block_until(lambda: not library.meeting)


def test_a_connection_after_an_abort_is_aborted() -> None:
    library, wait = NcclDouble(), threading.Event()
    name = library.unique_id()
    made: list[PairCommunicator] = []

    def connect(stream: Stream, given_up: Callable[[], bool]) -> PairCommunicator:
        made.append(library.meet(name, RECEIVER, lambda: False))
        wait.wait(5)
        return made[0]

    channel = NcclChannel(connect, DoubleStream(), SENDER, lambda: None)
    other = library.channel(name, SENDER, lambda: None)
    block_until(lambda: bool(made))
    channel.abort()
    block_until(lambda: channel.terminated)  # though NCCL has not come back
    wait.set()
    block_until(lambda: made[0].aborted)  # type: ignore[attr-defined]
    assert not channel.connected
    other.abort()
    block_until(lambda: other.terminated)


def test_a_library_that_fails_at_once() -> None:
    woken = threading.Event()

    def refuse(stream: Stream, given_up: Callable[[], bool]) -> PairCommunicator:
        raise RuntimeError("no such device")

    channel = NcclChannel(refuse, DoubleStream(), 0, woken.set)
    block_until(lambda: channel.failure is not None)
    assert "no such device" in str(channel.failure)
    assert woken.is_set()
    channel.abort()
    block_until(lambda: channel.terminated)


def test_an_abort_does_not_wait_for_a_blocked_call(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's calls block while the device waits for what the abort ends, so the aborting thread must not."""
    library, _, receiver = pair
    (ends,) = (each for each in library.ends if each.rank == RECEIVER)
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
    block_until(lambda: receiver.terminated)
    loop.join(5)
    assert not loop.is_alive()


def test_a_late_abort_calls_back_at_once(pair: Pair) -> None:
    _, _, receiver = pair
    first, second = threading.Event(), threading.Event()
    receiver.abort(then=first.set)
    block_until(lambda: receiver.terminated)
    assert first.is_set()
    receiver.abort(then=second.set)
    assert second.wait(5)


def test_an_abort_waits_until_no_step_is_being_launched() -> None:
    library, name, lock = NcclDouble(), NcclDouble().unique_id(), threading.Lock()
    channels = [library.channel(name, rank, lambda: None, lock) for rank in (SENDER, RECEIVER)]
    block_until(lambda: all(channel.connected for channel in channels))
    with lock:
        for channel in channels:
            channel.abort()
        time.sleep(0.05)
        assert not any(channel.terminated for channel in channels)
    block_until(lambda: all(channel.terminated for channel in channels))
