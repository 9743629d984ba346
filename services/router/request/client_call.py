"""What the requests of one client call share: prompts x choices run as requests of their own."""

from __future__ import annotations

import asyncio

from services.router.request.pool import Binding


class ClientCall:
    """One call of one client.

    `binding`: the pool that answers all of it. `next_turn`: the earliest turn in the waiting queue that its
    next request may have. `turnstile`: limits how many of its requests are in that queue at once; made by the
    queue, which knows how many that is.
    """

    def __init__(self) -> None:
        self.binding = Binding()
        self.next_turn = 0
        self.turnstile: asyncio.Semaphore | None = None
