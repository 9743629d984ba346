"""Links that fall to the next way and come back: what is tried when, what is logged and counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from baton.errors import ErrorKind
from tests.kvtransfer.peers import until
from tests.kvtransfer.ways import LOST, Ways, logged

FELL, RETURNED, ENDED = "link_fallback", "link_returned", "link_ended"


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.fixture
def ways() -> Iterator[Ways]:
    """Two: over `a`, and less good over `b`."""
    made = Ways("ab")
    yield made
    made.peers.close()


def fell(transport: str, reason: str) -> tuple[str, dict[str, object]]:
    return "WARNING", {"receiver": "receiver", "transport": transport, "reason": reason}


def ended(transport: str, reason: str) -> tuple[str, dict[str, object]]:
    return "INFO", {"receiver": "receiver", "transport": transport, "reason": reason}


def returned(transport: str, **replaced: str) -> tuple[str, dict[str, object]]:
    return "INFO", {"receiver": "receiver", "transport": transport, **replaced}


def fallen(ways: Ways) -> None:
    """`b` is in use, since `a` was out of reach."""
    a, _ = ways.ways
    a.out_of_reach = "nobody at a"
    assert ways.send(1) == "b"


def test_every_fall_and_return_is_logged_and_counted(ways: Ways, caplog: pytest.LogCaptureFixture) -> None:
    a, _ = ways.ways
    fallen(ways)
    assert logged(caplog, FELL) == [fell("b", "nobody at a")]
    assert ways.counted() == (1, 1, 0, 0)
    a.out_of_reach = ""
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


def test_after_the_last_way_the_best_has_its_turn_at_once(ways: Ways) -> None:
    a, b = ways.ways
    fallen(ways)
    a.out_of_reach = ""
    ways.cut(b)
    assert ways.send(2) == "a"
    assert ways.counted() == (2, 1, 0, 1)


def test_a_better_way_is_asked_when_its_pause_is_over_and_no_sooner(ways: Ways) -> None:
    """Beside the link in use, and twice as long after each failure."""
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


def test_a_return_may_go_no_further_than_the_next_better_way(caplog: pytest.LogCaptureFixture) -> None:
    """From there the best is tried again, and not what is in use by then."""
    ways = Ways("abc")
    a, b, _ = ways.ways
    a.out_of_reach, b.out_of_reach = "nobody at a", "nobody at b"
    assert ways.send(1) == "c"
    assert logged(caplog, FELL) == [fell("c", "nobody at b")]
    b.out_of_reach = ""
    ways.later(1.0)
    assert ways.send(2) == "b"
    assert (len(a.asked), len(b.asked)) == (2, 2)
    ways.later(1.75)
    assert len(a.asked) == 2
    a.out_of_reach = ""
    ways.later(0.25)
    assert (len(a.asked), len(b.asked)) == (3, 2)
    assert ways.send(3) == "a"
    assert logged(caplog, RETURNED) == [returned("b", replaced="c"), returned("a", replaced="b")]
    assert logged(caplog, FELL)[1:] == []
    ways.later(60.0)
    assert len(a.asked) == 3
    ways.peers.close()


def trying(ways: Ways) -> None:
    """`b` is in use, and `a`, which has not answered yet, is being tried beside it."""
    a, _ = ways.ways
    fallen(ways)
    a.out_of_reach = ""
    a.let_go.clear()
    ways.clock.now += 1.0
    ways.peers.step()
    ways.peers.run_until(lambda: len(a.asked) == 2)


def test_a_return_when_the_link_in_use_has_broken_replaces_none(
    ways: Ways, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = ways.ways
    trying(ways)
    ways.cut(b)
    a.let_go.set()
    ways.later(0.0)
    assert logged(caplog, RETURNED) == [returned("a")]
    assert ways.send(2) == "a"
    assert ways.counted() == (2, 1, 1, 1)


def test_a_return_that_fails_when_the_link_in_use_has_broken_leaves_no_way_out(ways: Ways) -> None:
    a, b = ways.ways
    trying(ways)
    ways.cut(b)
    a.out_of_reach = "nobody at a"
    a.let_go.set()
    ways.later(0.0)
    a.out_of_reach = ""
    assert ways.send(2) == "a"


def test_a_link_that_is_needed_sooner_than_the_return_is_ready_takes_its_place(
    ways: Ways, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = ways.ways
    trying(ways)
    ways.cut(b)
    a.let_go.set()
    # The receiver answers, and the sender does not look yet.
    until(lambda: bool(a.pipes), lambda: ways.peers.receiver.poll(4))
    assert ways.send(2) == "a"
    assert logged(caplog, RETURNED) == []
    assert a.asked[-1].keep_earlier is False
    assert ways.counted() == (2, 1, 0, 1)
    assert ways.in_use() == ways.received() == ["a"]


def test_a_return_that_takes_too_long_is_given_up(ways: Ways) -> None:
    a, _ = ways.ways
    trying(ways)
    ways.later(1.5 * ways.peers.shape.timeout_s + 0.5)
    a.let_go.set()
    assert ways.send(2) == "b"
    assert len(a.asked) == 2, "the pause has begun anew"
    ways.peers.run_until(lambda: ways.received() == ["b"])
    assert ways.counted() == (1, 1, 0, 0)


def test_a_link_that_was_replaced_ends_with_its_last_transfer_or_breaks(
    ways: Ways, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = ways.ways
    fallen(ways)
    half = ways.half(10)
    a.out_of_reach = ""
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


def test_closing_ends_a_link_that_is_being_tried(ways: Ways) -> None:
    a, _ = ways.ways
    trying(ways)
    ways.peers.sender.close()
    a.let_go.set()
    ways.peers.run_until(lambda: bool(a.pipes))
    ways.peers.run_until(lambda: ways.received() == [])


def test_closing_fails_what_is_under_way(ways: Ways, caplog: pytest.LogCaptureFixture) -> None:
    half = ways.half(1)
    ways.peers.sender.close()
    (failed,) = ways.peers.sender.poll(1)
    assert failed.transfer is half
    failure = failed.error  # type: ignore[union-attr]
    assert (failure.kind, failure.message) == (ErrorKind.UNAVAILABLE, "the sender closes")
    assert logged(caplog, ENDED) == [ended("a", "the sender closes")]
    assert not ways.peers.source.pins
