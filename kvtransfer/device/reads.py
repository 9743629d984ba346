"""Pieces of a link whose blocks the sender's device reads: announced, enqueued, read, in this order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from baton.device.stream import Event
from kvtransfer.protocol.frames import Piece

Read = Callable[[Piece, Sequence[int], Event | None], Event]
"""Enqueues the read of a piece's blocks, once an event completes; an event that completes when they have been
read. RuntimeError where the device fails."""


class BlockReads:
    """Owned by the loop."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._announced: deque[tuple[Piece, Sequence[int], Event | None]] = deque()
        self._events: deque[Event] = deque()
        self._enqueued = self._finished = 0

    def put(self, piece: Piece, blocks: Sequence[int], after: Event | None) -> None:
        """A piece of these blocks, which are final once `after` completes; `enqueue` must follow."""
        self._announced.append((piece, blocks, after))

    def enqueue(self, failed: Callable[[RuntimeError], None]) -> None:
        """Enqueues the reads of what was put; `failed` is called where the device fails. Such a piece counts
        as read once all are (`end`)."""
        while self._announced:
            self._enqueued += 1
            try:
                self._events.append(self._read(*self._announced.popleft()))
            except RuntimeError as error:
                failed(error)

    @property
    def busy(self) -> bool:
        """Whether the device may still be reading."""
        return bool(self._events)

    def count(self) -> int:
        """How many pieces have been read since the link was opened."""
        while self._events and self._events[0].query():
            self._events.popleft()
            self._finished += 1
        return self._finished

    def end(self) -> None:
        """The device reads nothing any more."""
        self._finished = self._enqueued
        self._events.clear()
