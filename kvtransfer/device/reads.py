"""Pieces of a link whose blocks its device reads: how many it has read, in the order of their puts."""

from __future__ import annotations

from collections import deque

from baton.device.stream import Event


class BlockReads:
    """Owned by the loop. `put`, and when the device was told of the piece `read_by`."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._put = self._read = 0

    def put(self) -> None:
        """One piece more. Should the device refuse it, it counts as read when all are."""
        self._put += 1

    def read_by(self, event: Event) -> None:
        """The piece that was put last has been read then."""
        self._events.append(event)

    @property
    def under_way(self) -> bool:
        return bool(self._events)

    def count(self) -> int:
        """Of the pieces that have been read since the beginning."""
        while self._events and self._events[0].query():
            self._events.popleft()
            self._read += 1
        return self._read

    def end(self) -> None:
        """The device reads none any more."""
        self._read = self._put
        self._events.clear()
