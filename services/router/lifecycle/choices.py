"""Runs the requests of one client call concurrently: one for each choice."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from typing import TYPE_CHECKING

from services.router.request.request import Delta

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from services.router.lifecycle.dispatcher import Dispatcher
    from services.router.lifecycle.outbox import Outbox
    from services.router.request.request import Request


@contextlib.asynccontextmanager
async def stream_choices(
    dispatcher: Dispatcher, requests: Sequence[Request]
) -> AsyncIterator[AsyncGenerator[tuple[int, Delta]]]:
    """Yields the deltas of all requests as they come, each with the index of its request. The first failure
    is raised. Leaving the context cancels whatever still runs."""
    available = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        outboxes = [
            await stack.enter_async_context(dispatcher.run(request, available)) for request in requests
        ]
        yield await stack.enter_async_context(contextlib.aclosing(_deltas(outboxes, available)))


async def _deltas(outboxes: Sequence[Outbox], available: asyncio.Event) -> AsyncGenerator[tuple[int, Delta]]:
    unfinished = dict(enumerate(outboxes))
    while unfinished:
        await available.wait()
        available.clear()
        for index, outbox in list(unfinished.items()):
            while (delta := outbox.take()) is not None:
                if delta.finish is not None:
                    del unfinished[index]
                yield index, delta


async def collect_choices(dispatcher: Dispatcher, requests: Sequence[Request]) -> list[Delta]:
    """Runs all requests to their ends. Returns each whole output as one delta, which is compact: ids and
    offsets take four bytes each, logprobs stay serialised."""
    outputs = [Delta(0, token_ids=array("I"), offsets=array("I"), opening=True) for _ in requests]
    texts: list[list[str]] = [[] for _ in requests]
    async with stream_choices(dispatcher, requests) as deltas:
        async for index, delta in deltas:
            whole = outputs[index]
            whole.token_ids.extend(delta.token_ids)
            whole.offsets.extend(delta.offsets)
            whole.logprobs += delta.logprobs
            whole.prompt_logprobs += delta.prompt_logprobs
            whole.finish, whole.usage = delta.finish, delta.usage
            texts[index].append(delta.text)
    for whole, parts in zip(outputs, texts, strict=True):
        whole.text = "".join(parts)
    return outputs
