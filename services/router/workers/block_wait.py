"""Keeps a decode worker for the oldest request that it refused for want of memory.

Without it a large request starves: whenever a few blocks become free, a smaller and younger request takes
them. One worker is kept at a time, so that the others go on as before; on the one that is kept no younger
request is placed, and the sequences that run there end one by one until the large request fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.common.observability.logs import get_log

if TYPE_CHECKING:
    from services.router.workers.worker import Worker

# Turn and order of arrival; a lower one is placed first.
Place = tuple[int, int]

_log = get_log("block_wait")


class BlockWait:
    """At most one request waits for blocks in this sense, and it is the oldest of those that were refused."""

    def __init__(self) -> None:
        # Its place, and the worker that is kept for it.
        self._waiting: tuple[Place, Worker] | None = None

    def refused(self, place: Place, worker: Worker) -> None:
        """A worker had no room for the request at this place."""
        if self._waiting is not None:
            oldest, kept = self._waiting
            if kept.alive and oldest <= place:
                return
        if not self.holds(place):
            _log.info("request_waits_for_blocks", worker=worker.name)
        self._waiting = place, worker

    def ended(self, place: Place) -> None:
        """The request at this place has its room, or does not wait any more."""
        if self.holds(place):
            self._waiting = None

    def holds(self, place: Place) -> bool:
        """Whether the request at this place is the one that waits."""
        return self._waiting is not None and self._waiting[0] == place

    def may_use(self, place: Place, worker: Worker, tokens: int) -> bool:
        """Whether a request for `tokens` may be placed on a worker that has a free slot.

        The one that waits is tried where it waits, and elsewhere once there are blocks enough for it.
        """
        if self._waiting is None:
            return True
        oldest, kept = self._waiting
        if not kept.alive or place < oldest:
            return True
        if place == oldest:
            return worker is kept or worker.has_blocks_for(tokens)
        return worker is not kept
