"""One answer of /v1/completions: its requests run side by side, each a choice with its index."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING

from baton.errors import BatonError
from services.common.errors import openai_body
from services.router.openai_api import choice_body, usage_body

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from starlette.types import Send

    from baton.v1.router_pb2 import Usage
    from services.router.openai_api import CompletionBody
    from services.router.outbox import Outbox
    from services.router.request import Delta, Request
    from services.router.service import Service

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Completion:
    """Runs admitted requests and words their output; cancelling it cancels them all."""

    def __init__(
        self, service: Service, body: CompletionBody, requests: Sequence[Request], answer_id: str
    ) -> None:
        self._service = service
        self._body = body
        self._requests = requests
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.intake.served_name,
        }

    async def whole(self) -> dict[str, object]:
        """The answer in one body; raises what any of its requests failed with."""
        async with self._running() as outboxes:
            deltas = await asyncio.gather(*(outbox.whole() for outbox in outboxes))
        choices = [self._choice(index, delta) for index, delta in enumerate(deltas)]
        usage = usage_body(*(delta.usage for delta in deltas if delta.usage is not None))
        return {**self._head, "choices": choices, "usage": usage}

    async def stream(self, send: Send) -> None:
        """Server-sent events, one a delta, then usage if asked for, then [DONE].

        The status goes out with the first event, so what fails before any token has its own
        status (it is raised); what fails later ends the stream with an error event.
        """
        started = False
        try:
            async with self._running() as outboxes:
                usages: list[Usage] = []
                async with contextlib.aclosing(merge(outboxes)) as deltas:
                    async for index, delta in deltas:
                        if not started:
                            await send(
                                {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
                            )
                            started = True
                        if delta.usage is not None:
                            usages.append(delta.usage)
                        await _event(send, self._chunk([self._choice(index, delta)]))
            if self._body.include_usage:
                await _event(send, {**self._head, "choices": [], "usage": usage_body(*usages)})
            await _send(send, b"data: [DONE]\n\n", more=False)
        except BatonError as error:
            if not started:
                raise
            await _event(send, openai_body(error))
            await _send(send, b"", more=False)

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[list[Outbox]]:
        async with contextlib.AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self._service.run(request)) for request in self._requests]

    def _choice(self, index: int, delta: Delta) -> dict[str, object]:
        token_ids = delta.token_ids if self._body.return_token_ids else None
        return choice_body(index, delta.text, delta.finish, token_ids)

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        usage = {"usage": None} if self._body.include_usage else {}
        return {**self._head, "choices": choices, **usage}


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


async def _event(send: Send, document: object) -> None:
    line = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    await _send(send, f"data: {line}\n\n".encode(), more=True)


async def _send(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
