"""The queues of the router's other processes."""

from __future__ import annotations

from typing import Protocol

from services.router.workers.backlog import Queued


class SiblingQueues(Protocol):
    """The queues of sibling processes, as far as these have reported them."""

    @property
    def waiting_for_prefill(self) -> int:
        """Requests that wait for a prefill worker."""

    @property
    def queued(self) -> Queued:
        """Requests that wait; where late requests are refused also seconds of their prompts, and these by
        length."""


class NoSiblings:
    """The siblings' queues of a router that is one process."""

    waiting_for_prefill = 0
    queued = Queued()
