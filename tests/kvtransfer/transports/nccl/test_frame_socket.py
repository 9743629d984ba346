"""Frames over a socket, and the acceptor of the senders' sockets."""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from baton.base.errors import BatonError, ErrorKind
from kvtransfer.protocol.frames import FrameError
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.transports.nccl.frame_acceptor import SECRET_BYTES, FrameAcceptor, connect_frames
from kvtransfer.transports.nccl.frame_socket import BUSY_S, MAX_FRAME_BYTES, FrameSocket
from tests.support.waiting import block_until

SECRET = LinkAuth().frames_secret(b"a link")


class Pair:
    """Two ends of one connection, the first of which is `here`; how often each was woken."""

    def __init__(self, bound: int = 100, busy_s: float = BUSY_S) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
        listener.close()
        self.woken = threading.Event()
        self.one = FrameSocket(self.here, bound, lambda: None, "other", busy_s)
        self.other = FrameSocket(there, bound, self.woken.set, "one", busy_s)

    def received(self, count: int) -> list[bytes]:
        found: list[bytes] = []

        def enough() -> bool:
            while (message := self.other.take()) is not None:
                found.append(message)
            return len(found) >= count

        block_until(enough)
        return found


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair of sockets; the parameter says for how long their ends poll after a frame."""
    made = Pair(busy_s=getattr(request, "param", BUSY_S))
    yield made
    made.one.close()
    made.other.close()


def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    sent = [b"", b"a", bytes(range(256)) * 300, b"end"]
    for message in sent:
        pair.one.add(message)
    assert pair.received(len(sent)) == sent
    assert pair.other.take() is None
    assert pair.other.failure() is None


def test_frames_beyond_the_socket_buffer_are_sent_later(pair: Pair) -> None:
    sent = [bytes([n]) * 1_000_000 for n in range(20)]
    for message in sent:
        pair.one.add(message)
    assert pair.one.busy_poll(), "who has something to send does not sleep"

    found: list[bytes] = []

    def all_there() -> bool:
        pair.one.take()  # what is left goes out
        while (message := pair.other.take()) is not None:
            found.append(message)
        return len(found) == len(sent)

    block_until(all_there)
    assert found == sent


def test_a_peer_that_reads_nothing_ends_it() -> None:
    pair = Pair(bound=3)
    tracemalloc.start()
    for _ in range(100):
        pair.one.add(bytes(1_000_000))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    broken = pair.one.failure()
    assert broken is not None
    assert "does not read" in broken.message
    assert held < 1_000_000, "what it had not sent is dropped"
    pair.one.close()
    pair.other.close()


def test_a_frame_that_is_too_long_is_refused_before_it_is_read(pair: Pair) -> None:
    pair.here.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(FrameError, match="a frame of"):
        pair.received(1)
    assert isinstance(pair.other.failure(), FrameError)
    assert pair.other.take() is None


def test_frames_sent_before_the_end_are_received(pair: Pair) -> None:
    pair.one.add(b"last")
    pair.one.close()
    assert pair.received(1) == [b"last"]
    block_until(lambda: pair.other.take() is None and pair.other.failure() is not None)
    assert "one's frames" in str(pair.other.failure())


@pytest.mark.parametrize("pair", [0.05], indirect=True)
def test_a_sleeping_loop_is_woken_by_the_next_frame(pair: Pair) -> None:
    pair.one.add(b"1")
    pair.received(1)
    assert pair.other.busy_poll()  # for a while after a frame it looks itself
    assert not pair.woken.is_set()
    block_until(lambda: not pair.other.busy_poll())
    time.sleep(0.05)
    assert not pair.woken.is_set()
    pair.one.add(b"2")
    block_until(pair.woken.is_set)
    assert pair.received(1) == [b"2"]


def test_the_thread_ends_with_its_socket() -> None:
    before = threading.active_count()
    pair = Pair()
    pair.other.busy_poll()
    time.sleep(0.02)
    for end in (pair.one, pair.other):
        end.close()
        end.close()
        end.add(b"dropped")
        assert end.take() is None
    block_until(lambda: threading.active_count() <= before)


class Listening:
    def __init__(self, **bounds: Any) -> None:
        self.woken = threading.Event()
        self.acceptor = FrameAcceptor("127.0.0.1", self.woken.set, **bounds)

    def call(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.acceptor.port), 5)


@pytest.fixture
def at(request: pytest.FixtureRequest) -> Iterator[Listening]:
    """A listening acceptor; the parameter gives its bounds."""
    made = Listening(**getattr(request, "param", {}))
    yield made
    made.acceptor.close()


def sent_away(caller: socket.socket) -> bool:
    with caller:
        caller.settimeout(5)
        try:
            return caller.recv(1) == b""
        except ConnectionError:
            return True


def test_a_secret_is_accepted_once(at: Listening) -> None:
    brought = at.acceptor.expect(SECRET)
    ours = connect_frames("127.0.0.1", at.acceptor.port, SECRET, 5.0)
    theirs = brought.result(5)
    block_until(at.woken.is_set)
    ours.sendall(b"frame")
    theirs.setblocking(True)
    assert theirs.recv(5) == b"frame"
    assert sent_away(connect_frames("127.0.0.1", at.acceptor.port, SECRET, 5.0))
    ours.close()
    theirs.close()


def test_unknown_secrets_are_rejected(at: Listening) -> None:
    brought = at.acceptor.expect(SECRET)
    assert sent_away(connect_frames("127.0.0.1", at.acceptor.port, bytes(SECRET_BYTES), 5.0))
    gone = at.call()
    gone.sendall(SECRET[:5])
    gone.close()
    assert not brought.done()
    brought.cancel()
    assert sent_away(connect_frames("127.0.0.1", at.acceptor.port, SECRET, 5.0))


@pytest.mark.parametrize("at", [{"secret_timeout_s": 0.2}], indirect=True)
def test_a_silent_caller_does_not_delay_others(at: Listening) -> None:
    silent = [at.call() for _ in range(3)]
    brought = at.acceptor.expect(SECRET)
    ours = at.call()
    for byte in SECRET:
        ours.sendall(bytes([byte]))
    brought.result(5).close()
    assert all(sent_away(caller) for caller in silent)
    ours.close()


@pytest.mark.parametrize("at", [{"max_callers": 2}], indirect=True)
def test_too_many_callers_are_rejected(at: Listening) -> None:
    waiting = [at.call() for _ in range(2)]
    assert sent_away(at.call())  # callers are accepted in the order in which they came
    for caller in waiting:
        caller.close()


def test_closing_the_acceptor_drops_callers_and_ends_its_thread() -> None:
    before = threading.active_count()
    at = Listening()
    brought = at.acceptor.expect(SECRET)
    caller = at.call()
    at.acceptor.close()
    at.acceptor.close()
    assert sent_away(caller)
    assert not brought.done()
    assert threading.active_count() <= before
    with pytest.raises(OSError):
        connect_frames("127.0.0.1", at.acceptor.port, SECRET, 0.5)


def test_a_host_that_cannot_be_bound_is_refused() -> None:
    with pytest.raises(BatonError, match="cannot listen on 203") as error:
        FrameAcceptor("203.0.113.1", lambda: None)
    assert error.value.kind is ErrorKind.INVALID


def test_frames_come_over_both_families_to_an_acceptor_at_all_addresses() -> None:
    acceptor = FrameAcceptor("::", lambda: None)
    for host in ("127.0.0.1", "::1"):
        brought = acceptor.expect(SECRET)
        with connect_frames(host, acceptor.port, SECRET, 5.0):
            brought.result(5.0).close()
    acceptor.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_fixed_port_in_either_family(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as free:
        port = free.getsockname()[1]
    acceptor = FrameAcceptor(host, lambda: None, port)
    brought = acceptor.expect(SECRET)
    with connect_frames(host, port, SECRET, 5.0):
        brought.result(5.0).close()
    acceptor.close()
