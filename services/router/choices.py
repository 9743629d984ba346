"""Requests of one call that run side by side: one a choice, their deltas told as they come."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from services.router.outbox import Outbox
    from services.router.request import Delta, Request
    from services.router.service import Service


@contextlib.asynccontextmanager
async def running(service: Service, requests: Sequence[Request]) -> AsyncIterator[list[Outbox]]:
    """Runs them all; leaving the context cancels whatever of them still runs."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(service.run(request)) for request in requests]


async def merge(outboxes: Sequence[Outbox]) -> AsyncGenerator[tuple[int, Delta]]:
    """The deltas of all outboxes as they come, each with the index of its own."""
    if len(outboxes) == 1:
        async for delta in outboxes[0].deltas():
            yield 0, delta
        return
    streams = [outbox.deltas() for outbox in outboxes]
    pending = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                index = pending.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:
                    continue
                pending[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, delta
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
