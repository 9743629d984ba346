"""Requests of one call that run side by side: one a choice, their deltas told as they come."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from services.router.request.whole_output import WholeOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from services.router.lifecycle.outbox import Outbox
    from services.router.lifecycle.service import Service
    from services.router.request.request import Delta, Request


@contextlib.asynccontextmanager
async def running(
    service: Service, requests: Sequence[Request]
) -> AsyncIterator[AsyncGenerator[tuple[int, Delta]]]:
    """Runs them all and gives their deltas as they come, each with the index of its request, as much at a
    time as there is; the first failure is raised. Leaving the context cancels whatever still runs."""
    news = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        outboxes = [await stack.enter_async_context(service.run(request, news)) for request in requests]
        yield await stack.enter_async_context(contextlib.aclosing(_deltas(outboxes, news)))


async def _deltas(outboxes: Sequence[Outbox], news: asyncio.Event) -> AsyncGenerator[tuple[int, Delta]]:
    unfinished = dict(enumerate(outboxes))
    while unfinished:
        await news.wait()
        news.clear()
        for index, outbox in list(unfinished.items()):
            while (delta := outbox.take()) is not None:
                if delta.finish is not None:
                    del unfinished[index]
                yield index, delta


async def whole(service: Service, requests: Sequence[Request]) -> list[WholeOutput]:
    """Runs them all to their ends."""
    outputs = [WholeOutput() for _ in requests]
    async with running(service, requests) as deltas:
        async for index, delta in deltas:
            outputs[index].append(delta)
    return outputs
