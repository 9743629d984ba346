"""Reports of the parent of several router processes about those that do not answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.router.processes.member_health import MemberHealth, failure, silence


class Told:
    """Reports that were made, at times that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.messages: list[Mapping[str, Any]] = []
        self.health = MemberHealth(self.messages.append, lambda: self.now)

    def last(self) -> tuple[str | None, str | None]:
        return silence(self.messages[-1]), failure(self.messages[-1])


def test_a_silent_process_is_named_until_it_answers() -> None:
    told = Told()
    told.health.changed(0, silent=False)
    told.health.changed(1, silent=False)
    assert told.messages == []
    told.health.changed(1, silent=True)
    assert told.last() == ("router process 1 does not answer", None)
    told.now = 100
    told.health.review()
    assert told.last()[1] is None  # it has not ended: whoever kills it decides
    told.health.changed(0, silent=True)
    assert told.last() == ("router processes 0, 1 do not answer", None)
    told.health.changed(0, silent=False)
    told.health.changed(1, silent=False)
    assert told.last() == (None, None)


def test_a_process_that_is_not_replaced() -> None:
    told = Told()
    told.health.ended(1)
    assert told.last() == ("router process 1 does not answer", None)
    told.now = 29
    told.health.ended(1)  # its replacement has ended too
    told.health.review()
    assert told.last()[1] is None
    told.now = 31
    told.health.review()
    assert told.last() == ("router process 1 does not answer", "router process 1 is not replaced")
    count = len(told.messages)
    told.health.review()
    assert len(told.messages) == count
    told.health.changed(1, silent=False)
    assert told.last() == (None, None)


def test_other_messages_say_nothing() -> None:
    messages: list[dict[str, Any]] = [{}, {"workers": []}, {"silent_processes": []}, {"silent_processes": 1}]
    for message in messages:
        assert (silence(message), failure(message)) == (None, None)
