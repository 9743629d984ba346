"""Reserves a decode worker for the oldest request that it refused for lack of KV blocks.

Otherwise a large request would starve: whenever a few blocks become free, a smaller and younger request takes
them. At most one worker is reserved. No younger request is placed there, and the sequences that run there end
one by one until the large request fits; the other workers are not affected.
"""

from __future__ import annotations

from services.common.observability.logs import get_log
from services.router.workers.worker import Worker

# Turn and order of arrival. Lower positions are placed first.
QueuePosition = tuple[int, int]

_log = get_log("block_wait")


class BlockWait:
    """Holds at most one reservation: for the oldest of the requests that were refused."""

    def __init__(self) -> None:
        # The request's position and the worker that is reserved for it.
        self._waiting: tuple[QueuePosition, Worker] | None = None

    def refused(self, position: QueuePosition, worker: Worker) -> None:
        """A worker had no blocks for the request at this position."""
        if self._waiting is not None:
            oldest, reserved = self._waiting
            if reserved.alive and oldest <= position:
                return
        if not self.holds(position):
            _log.info("request_waits_for_blocks", worker=worker.name)
        self._waiting = position, worker

    def ended(self, position: QueuePosition) -> None:
        """The request at this position has its blocks, or no longer waits."""
        if self.holds(position):
            self._waiting = None

    def holds(self, position: QueuePosition) -> bool:
        """Whether the reservation is for the request at this position."""
        return self._waiting is not None and self._waiting[0] == position

    def may_use(self, position: QueuePosition, worker: Worker, tokens: int) -> bool:
        """Whether the request at this position, for `tokens`, may be placed on a worker with a free slot.

        The waiting request may use its reserved worker, and others once they have enough blocks.
        """
        if self._waiting is None:
            return True
        oldest, reserved = self._waiting
        if not reserved.alive or position < oldest:
            return True
        if position == oldest:
            return worker is reserved or worker.has_blocks_for(tokens)
        return worker is not reserved
