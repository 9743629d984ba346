"""Knows the router processes that do not answer, as seen by the process that starts them, and tells all of
them: the kernel goes on giving each its share of new connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

# Seconds in which a process's replacement must answer: else the router is to be restarted.
REPLACED_WITHIN_S = 30.0


class MemberHealth:
    """Health of the router processes, held by the process that starts them; `tell` sends them a message
    whenever what it says changes."""

    def __init__(
        self, tell: Callable[[Mapping[str, Any]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: monotonic seconds."""
        self._tell = tell
        self._clock = clock
        self._silent: set[int] = set()
        self._ended: dict[int, float] = {}
        self._told: Mapping[str, Any] = {"silent_processes": [], "failed_processes": []}

    def changed(self, index: int, silent: bool) -> None:
        """Records that a process is silent, or answers."""
        if silent:
            self._silent.add(index)
        else:
            self._silent.discard(index)
            self._ended.pop(index, None)
        self.review()

    def ended(self, index: int) -> None:
        """Records that a process that has answered has ended, or that its replacement has."""
        self._silent.add(index)
        self._ended.setdefault(index, self._clock())
        self.review()

    def review(self) -> None:
        """Tells what has changed; to be called every second or so, too."""
        now = self._clock()
        failed = sorted(index for index, at in self._ended.items() if now - at > REPLACED_WITHIN_S)
        message = {"silent_processes": sorted(self._silent), "failed_processes": failed}
        if message != self._told:
            self._told = message
            self._tell(message)


def silence(message: Mapping[str, Any]) -> str | None:
    """Says why a router is not ready, by a message of `MemberHealth`; None where all processes answer."""
    return _named(message.get("silent_processes"), "does not answer", "do not answer")


def failure(message: Mapping[str, Any]) -> str | None:
    """Says why a router should be restarted, by such a message; None where it need not be."""
    return _named(message.get("failed_processes"), "is not replaced", "are not replaced")


def _named(indexes: object, one: str, several: str) -> str | None:
    if not isinstance(indexes, list) or not indexes:
        return None
    numbers = ", ".join(map(str, indexes))
    return f"router process {numbers} {one}" if len(indexes) == 1 else f"router processes {numbers} {several}"
