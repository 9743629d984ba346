"""State that the requests of one client call share: each choice of each prompt runs as a request."""

from __future__ import annotations

import asyncio

from services.router.request.pool import Binding


class ClientCall:
    """One call of one client.

    `binding`: the pool that serves all of it. `next_turn`: the earliest turn in the waiting queue that its
    next request may have. `in_queue`: limits how many of its requests are in that queue at once; made by the
    queue, which knows the limit.
    """

    def __init__(self) -> None:
        self.binding = Binding()
        self.next_turn = 0
        self.in_queue: asyncio.Semaphore | None = None
