"""What a door opens onto: one call that runs a request and gives its output."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from baton.errors import BatonError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator

    from services.router.dispatch import Dispatcher
    from services.router.intake import Intake
    from services.router.outbox import Outbox
    from services.router.placement import Placement
    from services.router.request import Asked, Request


class Service:
    """The router without its doors."""

    def __init__(self, intake: Intake, dispatcher: Dispatcher, placement: Placement) -> None:
        self.intake = intake
        self.dispatcher = dispatcher
        self._placement = placement

    def usable(self) -> bool:
        """Whether a request would be served."""
        return self._placement.usable() and not self.dispatcher.draining

    async def admit(self, asked: Asked, remaining_s: float | None = None) -> list[Request]:
        """Judges what was asked; see Intake.admit."""
        try:
            return await self.intake.admit(asked, time.monotonic_ns(), remaining_s)
        except BatonError as error:
            self.dispatcher.observations.refused(error.kind)
            raise

    @contextlib.asynccontextmanager
    async def run(self, request: Request, news: asyncio.Event) -> AsyncIterator[Outbox]:
        """Runs an admitted request; leaving the context cancels whatever of it still runs."""
        async with self.dispatcher.run(request, self.intake.output_text(request), news) as outbox:
            yield outbox
