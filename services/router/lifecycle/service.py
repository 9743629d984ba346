"""What a door opens onto: one call that runs a request and gives its output."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from baton.errors import BatonError
from services.router.request.answer_limit import check_answer, shorten

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Iterator

    from services.router.lifecycle.admission import Intake
    from services.router.lifecycle.dispatcher import Dispatcher
    from services.router.lifecycle.outbox import Outbox
    from services.router.request.request import Asked, Request
    from services.router.workers.placement import Placement


class Service:
    """The router without its doors."""

    def __init__(
        self, intake: Intake, dispatcher: Dispatcher, placement: Placement, max_answer_values: int
    ) -> None:
        """`max_answer_values`: see `answer_limit`."""
        self.intake = intake
        self._max_answer_values = max_answer_values
        self.dispatcher = dispatcher
        self._placement = placement

    def usable(self) -> bool:
        """Whether a request would be served."""
        return self._placement.usable() and not self.dispatcher.draining

    def unready_reason(self) -> str | None:
        """Why a request would not be served, without names or addresses; None where it would be."""
        if self.dispatcher.draining:
            return "the router is draining"
        return None if self._placement.usable() else self._placement.unusable_reason()

    async def admit(
        self, *asked: Asked, remaining_s: float | None = None, arrived_ns: int | None = None
    ) -> list[Request]:
        """Judges what one answer is to have, and arrived then (monotonic; unset: now); see Intake.admit.
        Raises FieldError where it is too much."""
        arrived_ns = time.monotonic_ns() if arrived_ns is None else arrived_ns
        requests: list[Request] = []
        most = self._max_answer_values
        with self.counting_refusals():
            for one in asked:
                admitted = await self.intake.admit(one, arrived_ns, remaining_s)
                fills = one.fills_context and one.max_tokens is None
                requests += shorten(admitted, most) if fills else admitted
            check_answer(requests, most)
        return requests

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts a request that is refused within the context."""
        try:
            yield
        except BatonError as error:
            self.dispatcher.observations.refused(error.kind)
            raise

    @contextlib.asynccontextmanager
    async def run(self, request: Request, news: asyncio.Event) -> AsyncIterator[Outbox]:
        """Runs an admitted request; leaving the context cancels whatever of it still runs."""
        async with self.dispatcher.run(request, self.intake.output_text(request), news) as outbox:
            yield outbox
