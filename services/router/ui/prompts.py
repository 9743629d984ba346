"""Prompts that are tried on the web page. They are admitted as those of the public API are, with the same
limits; the answer is a stream of events with its text, and at the end where its time went."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import Send

from baton.base.errors import FieldError
from baton.v1.router_pb2 import RequestTrace
from services.common.errors import openai_body
from services.router.api.event_stream import EventStream
from services.router.formats.answer_headers import answer_headers
from services.router.formats.timings import spans
from services.router.http.errors import ended_by
from services.router.lifecycle.dispatcher import Dispatcher
from services.router.request.request import Delta, Request
from services.router.tokenization.request_reader import Body

Admit = Callable[[Body, Mapping[str, str]], Awaitable[tuple[object, list[Request]]]]
Handler = Callable[[HttpRequest, Send], Awaitable[None]]


class Prompts:
    """Runs requests of one output."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def handler(self, admit: Admit) -> Handler:
        """The handler of a route whose bodies `admit` reads."""

        async def handle(request: HttpRequest, send: Send) -> None:
            _, requests = await admit(request.state.body, request.headers)
            if len(requests) != 1:
                raise FieldError("one output at a time is shown here", param="n")
            request.state.deadline = requests[0].deadline
            await self._stream(requests, send)

        return handle

    async def _stream(self, requests: Sequence[Request], send: Send) -> None:
        """Sends `{"text"}` for each part, then `{"finish", "usage", "trace"}`. An error before the first
        event is raised, a later one sent as `{"error"}`."""
        events = EventStream(send, answer_headers(requests[0]))
        try:
            async with self._dispatcher.stream(requests) as deltas:
                async for _, delta in deltas:
                    if delta.text:
                        await events.send({"text": delta.text})
                    if delta.finish is not None:
                        await events.send(_end(delta, len(requests[0].prompt_ids)))
        except Exception as error:
            if not events.started:
                raise
            await events.send(openai_body(ended_by(error)))
        await events.write(b"", last=True)


def _end(delta: Delta, prompt_tokens: int) -> dict[str, Any]:
    assert delta.finish is not None
    usage = delta.usage
    return {
        "finish": delta.finish.name.lower(),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 0 if usage is None else usage.completion_tokens,
        "cached_tokens": 0 if usage is None else usage.cached_tokens,
        "trace": None if delta.trace is None else _trace(delta.trace),
    }


def _trace(trace: RequestTrace) -> dict[str, Any]:
    """`spans`: [name, begin, end] in milliseconds since the request arrived, in order."""
    return {
        "prefill_worker": trace.prefill_worker,
        "decode_worker": trace.decode_worker,
        "attempts": trace.attempts,
        "kv_bytes": trace.kv_bytes_shipped,
        "reason": trace.prefill_reason,
        "spans": [[name, begin, end] for name, (begin, end) in spans(trace).items()],
    }
