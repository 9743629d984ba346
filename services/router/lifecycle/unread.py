"""What all clients together have not read yet of their outputs, and a bound on it."""

from __future__ import annotations

from typing import Protocol


class Holder(Protocol):
    """What holds output that is not read yet."""

    unread: int

    def overflow(self) -> None:
        """Drops its output and fails its request."""
        ...


class Unread:
    """Bytes that outboxes hold. Above the limit the one that holds the most gives way."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._holders: set[Holder] = set()
        self.total = 0

    def add(self, holder: Holder, size: int) -> None:
        """Counts output that was put somewhere."""
        self._holders.add(holder)
        holder.unread += size
        self.total += size
        while self.total > self._most:
            largest = max(self._holders, key=lambda one: one.unread)
            self.release(largest)
            largest.overflow()

    def release(self, holder: Holder) -> None:
        """All that it holds was read, or dropped."""
        self._holders.discard(holder)
        self.total -= holder.unread
        holder.unread = 0
