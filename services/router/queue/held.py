"""Workers that one scan of the queue keeps for requests that wait for them.

Workers may differ in what they can serve. A request that finds no room blocks those behind it from the
workers that it fits, so that it is placed as soon as one of them has room. What it does not fit anyway is
free for others: a small worker does not stand idle since a large request waits for a large one.
"""

from __future__ import annotations

from services.router.placement.fitting import Fitting
from services.router.placement.placement import NoRoom
from services.router.workers.worker import Worker


class Held:
    """Workers that are kept for requests which a scan of the queue has skipped; empty at its beginning."""

    def __init__(self) -> None:
        self._prefills: set[Worker] = set()
        self._decodes: set[Worker] = set()

    def clear(self) -> None:
        """Forgets what is held, for another scan."""
        self._prefills.clear()
        self._decodes.clear()

    def may_prefill(self, worker: Worker) -> bool:
        """True if a prefill worker is kept for no request that was skipped."""
        return worker not in self._prefills

    def may_decode(self, worker: Worker) -> bool:
        """True if a decode worker is kept for no request that was skipped."""
        return worker not in self._decodes

    def hold(self, why: NoRoom, fitting: Fitting, among: Fitting) -> bool:
        """Keeps the workers that a request fits which was not placed: where it waits for a prefill worker, a
        slot for it, too. Returns whether none of the workers `among` which it waits is left for others."""
        self._decodes |= fitting.decodes
        if why is NoRoom.PREFILL:
            self._prefills |= fitting.prefills
        return self._prefills >= among.prefills or self._decodes >= among.decodes
