"""What waits in the queues of the router's other processes."""

from __future__ import annotations

from typing import Protocol

from services.router.workers.backlog import Queued


class SiblingQueues(Protocol):
    """As far as those processes have reported it."""

    @property
    def waiting_for_prefill(self) -> int:
        """Requests that wait for a prefill worker."""

    @property
    def queued(self) -> Queued:
        """All that wait; where late requests are refused also seconds of their prompts, and these by
        length."""


class NoSiblings:
    """Of a router that is one process."""

    waiting_for_prefill = 0
    queued = Queued()
