"""Links that fall back to the next route and return: what is tried when, logged and counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from baton.base.errors import ErrorKind
from tests.kvtransfer.support.several_routes import LOST, SeveralRoutes, logged
from tests.support.waiting import block_until

FELL, RETURNED, ENDED = "link_fallback", "link_returned", "link_ended"


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.fixture
def ways() -> Iterator[SeveralRoutes]:
    """Two routes: `a`, and the worse `b`."""
    made = SeveralRoutes("ab")
    yield made
    made.peers.close()


def fell(transport: str, reason: str) -> tuple[str, dict[str, object]]:
    return "WARNING", {"receiver": "receiver", "transport": transport, "reason": reason}


def ended(transport: str, reason: str) -> tuple[str, dict[str, object]]:
    return "INFO", {"receiver": "receiver", "transport": transport, "reason": reason}


def returned(transport: str, **replaced: str) -> tuple[str, dict[str, object]]:
    return "INFO", {"receiver": "receiver", "transport": transport, **replaced}


def fallen(ways: SeveralRoutes) -> None:
    """`b` is in use, since `a` was unreachable."""
    a, _ = ways.ways
    a.unreachable = "no listener at a"
    assert ways.send(1) == "b"


def test_every_fallback_and_return_is_logged_and_counted(
    ways: SeveralRoutes, caplog: pytest.LogCaptureFixture
) -> None:
    a, _ = ways.ways
    fallen(ways)
    assert logged(caplog, FELL) == [fell("b", "no listener at a")]
    assert ways.counted() == (1, 1, 0, 0)
    a.unreachable = ""
    ways.later(1.0)
    assert ways.send(2) == "a"
    assert logged(caplog, RETURNED) == [returned("a", replaced="b")]
    assert ways.counted() == (2, 1, 1, 0)
    assert ways.in_use() == ways.received() == ["a"]
    ways.cut(a)
    assert logged(caplog, ENDED) == [ended("a", LOST)]
    assert ways.counted() == (2, 1, 1, 1)
    assert ways.send(3) == "b"
    assert logged(caplog, FELL)[1:] == [fell("b", LOST)]
    assert ways.counted() == (3, 2, 1, 1)
    ways.later(60.0)
    assert ways.send(4) == "a"
    assert logged(caplog, RETURNED)[1:] == [returned("a", replaced="b")]
    assert ways.counted() == (4, 2, 2, 1)
    ways.cut(a)
    assert ways.counted() == (4, 2, 2, 2)


def test_after_the_last_route_the_best_is_tried_at_once(ways: SeveralRoutes) -> None:
    a, b = ways.ways
    fallen(ways)
    a.unreachable = ""
    ways.cut(b)
    assert ways.send(2) == "a"
    assert ways.counted() == (2, 1, 0, 1)


def test_a_better_route_is_tried_when_its_pause_is_over(ways: SeveralRoutes) -> None:
    """The better route is tried in parallel to the link in use, with pauses that double after each
    failure."""
    a, b = ways.ways
    fallen(ways)
    for pause, asked in ((1.0, 2), (2.0, 3), (4.0, 4)):
        ways.later(pause - 0.25)
        assert len(a.asked) == asked - 1
        ways.later(0.25)
        assert len(a.asked) == asked
    assert ways.send(2) == "b"
    assert [request.keep_earlier for request in a.asked] == [False, True, True, True]
    assert [request.link_number for request in a.asked] == [1, 2, 3, 4]
    assert [request.link_number for request in b.asked] == [1]
    assert ways.counted() == (1, 1, 0, 0)


def test_a_return_may_reach_only_the_next_better_route(caplog: pytest.LogCaptureFixture) -> None:
    """The best route is tried again from there, and not the one in use by then."""
    ways = SeveralRoutes("abc")
    a, b, _ = ways.ways
    a.unreachable, b.unreachable = "no listener at a", "no listener at b"
    assert ways.send(1) == "c"
    assert logged(caplog, FELL) == [fell("c", "no listener at b")]
    b.unreachable = ""
    ways.later(1.0)
    assert ways.send(2) == "b"
    assert (len(a.asked), len(b.asked)) == (2, 2)
    ways.later(1.75)
    assert len(a.asked) == 2
    a.unreachable = ""
    ways.later(0.25)
    assert (len(a.asked), len(b.asked)) == (3, 2)
    assert ways.send(3) == "a"
    assert logged(caplog, RETURNED) == [returned("b", replaced="c"), returned("a", replaced="b")]
    assert logged(caplog, FELL)[1:] == []
    ways.later(60.0)
    assert len(a.asked) == 3
    ways.peers.close()


def trying(ways: SeveralRoutes) -> None:
    """`b` is in use, and `a`, which has not answered yet, is being tried in parallel."""
    a, _ = ways.ways
    fallen(ways)
    a.unreachable = ""
    a.answering.clear()
    ways.clock.now += 1.0
    ways.peers.step()
    ways.peers.run_until(lambda: len(a.asked) == 2)


def test_a_return_when_the_link_in_use_has_broken_replaces_none(
    ways: SeveralRoutes, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = ways.ways
    trying(ways)
    ways.cut(b)
    a.answering.set()
    ways.later(0.0)
    assert logged(caplog, RETURNED) == [returned("a")]
    assert ways.send(2) == "a"
    assert ways.counted() == (2, 1, 1, 1)


def test_a_return_that_fails_after_the_link_in_use_broke_skips_no_route(ways: SeveralRoutes) -> None:
    a, b = ways.ways
    trying(ways)
    ways.cut(b)
    a.unreachable = "no listener at a"
    a.answering.set()
    ways.later(0.0)
    a.unreachable = ""
    assert ways.send(2) == "a"


def test_a_link_that_is_needed_sooner_than_the_return_is_ready_takes_its_place(
    ways: SeveralRoutes, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = ways.ways
    trying(ways)
    ways.cut(b)
    a.answering.set()
    # The receiver answers, and the sender does not look yet.
    block_until(lambda: bool(a.pipes), step=lambda: ways.peers.receiver.poll(4))
    assert ways.send(2) == "a"
    assert logged(caplog, RETURNED) == []
    assert a.asked[-1].keep_earlier is False
    assert ways.counted() == (2, 1, 0, 1)
    assert ways.in_use() == ways.received() == ["a"]


def test_a_return_has_a_deadline(ways: SeveralRoutes) -> None:
    a, _ = ways.ways
    trying(ways)
    ways.later(1.5 * ways.peers.shape.timeout_s + 0.5)
    a.answering.set()
    assert ways.send(2) == "b"
    assert len(a.asked) == 2, "the pause has begun anew"
    ways.peers.run_until(lambda: ways.received() == ["b"])
    assert ways.counted() == (1, 1, 0, 0)


def test_a_link_that_was_replaced_ends_with_its_last_transfer_or_breaks(
    ways: SeveralRoutes, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = ways.ways
    fallen(ways)
    half = ways.half(10)
    a.unreachable = ""
    ways.later(1.0)
    ways.send(2)
    assert ways.in_use() == ["b", "a"]
    ways.cut(b)
    failure = ways.peers.failures()[half.transfer_id]
    assert (failure.kind, failure.message) == (ErrorKind.UNAVAILABLE, LOST)
    assert logged(caplog, ENDED) == [ended("b", LOST)]
    assert ways.counted() == (2, 1, 1, 1)
    assert ways.send(3) == "a"
    assert ways.counted() == (2, 1, 1, 1)


def test_closing_ends_a_link_that_is_being_tried(ways: SeveralRoutes) -> None:
    a, _ = ways.ways
    trying(ways)
    ways.peers.sender.close()
    a.answering.set()
    ways.peers.run_until(lambda: bool(a.pipes))
    ways.peers.run_until(lambda: ways.received() == [])


def test_closing_fails_active_transfers(ways: SeveralRoutes, caplog: pytest.LogCaptureFixture) -> None:
    half = ways.half(1)
    ways.peers.sender.close()
    (failed,) = ways.peers.sender.poll(1)
    assert failed.transfer is half
    failure = failed.error  # type: ignore[union-attr]
    assert (failure.kind, failure.message) == (ErrorKind.UNAVAILABLE, "the sender closes")
    assert logged(caplog, ENDED) == [ended("a", "the sender closes")]
    assert not ways.peers.source.pins
