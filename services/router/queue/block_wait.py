"""Reserves a decode worker for the oldest request that it refused for lack of KV blocks: the one that was
placed first.

Otherwise a large request would starve: whenever a few blocks become free, a smaller and younger request takes
them. At most one worker is reserved. No younger request is placed there, and the sequences that run there end
one by one until the large request fits; the other workers are not affected.
"""

from __future__ import annotations

from services.common.observability.logs import get_log
from services.router.workers.worker import Worker

# A request's number in the order of first placements; above all others before that.
PlacedNumber = int

_log = get_log("block_wait")


class BlockWait:
    """Holds at most one reservation: for the oldest of the requests that were refused."""

    def __init__(self) -> None:
        # The request's number and the worker that is reserved for it.
        self._waiting: tuple[PlacedNumber, Worker] | None = None

    def refused(self, number: PlacedNumber, worker: Worker) -> None:
        """Records that a worker had no blocks for the request of this number."""
        if self._waiting is not None:
            oldest, reserved = self._waiting
            if reserved.alive and oldest <= number:
                return
        if not self.holds(number):
            _log.info("request_waits_for_blocks", worker=worker.name)
        self._waiting = number, worker

    def ended(self, number: PlacedNumber) -> None:
        """Ends the reservation of the request of this number, which has its blocks, or no longer waits."""
        if self.holds(number):
            self._waiting = None

    def holds(self, number: PlacedNumber) -> bool:
        """True if the reservation is for the request of this number."""
        return self._waiting is not None and self._waiting[0] == number

    def may_use(self, number: PlacedNumber, worker: Worker, tokens: int) -> bool:
        """True if the request of this number, for `tokens`, may be placed on a worker with a free slot.

        The waiting request may use its reserved worker, and others once they have enough blocks.
        """
        if self._waiting is None:
            return True
        oldest, reserved = self._waiting
        if not reserved.alive or number < oldest:
            return True
        if number == oldest:
            return worker is reserved or worker.has_blocks_for(tokens)
        return worker is not reserved
