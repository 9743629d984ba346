"""An event that completes when the test says so."""

from __future__ import annotations


class FakeEvent:
    """A `baton.device.streams.stream.Event` of no device."""

    handle = 0

    def __init__(self, *, complete: bool = False) -> None:
        self.complete = complete

    def query(self) -> bool:
        return self.complete

    def synchronize(self) -> None:
        assert self.query(), "a test waits for an event that never completes"
