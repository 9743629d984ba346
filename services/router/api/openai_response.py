"""The response to a completion or chat completion, whole or streamed. Each request of it is a choice."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Protocol

from starlette.types import Send

from baton.v1.router_pb2 import Usage
from services.common.errors import openai_body
from services.router.api.event_stream import EventStream
from services.router.formats.answer_headers import answer_headers
from services.router.formats.json_bodies import encode, send_json, utf8
from services.router.formats.openai.fields import StreamOptions
from services.router.http.errors import ended_by
from services.router.lifecycle.dispatcher import Dispatcher
from services.router.request.request import Delta, Request


class Formatter(Protocol):
    """The response format of one API."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def take(self, index: int, request: Request, delta: Delta) -> None:
        """Reads more of an output that is not streamed, as it comes."""
        ...

    def reasoning_tokens(self) -> int | None:
        """Counts the tokens of reasoning of all outputs, so far; None where there is no reasoning."""
        ...

    def whole(self, index: int, request: Request, delta: Delta) -> dict[str, object]:
        """One choice of a response that is not streamed. Its long lists may be iterators."""
        ...

    def chunks(self, index: int, request: Request, delta: Delta) -> list[str]:
        """The choice of each chunk that reports this delta, in order, as JSON."""
        ...


class CompletionResponse:
    """Runs admitted requests and formats their output. Cancelling a method cancels all requests."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: str,
        requests: Sequence[Request],
        formatter: Formatter,
        options: StreamOptions | None = None,
    ) -> None:
        """`model`: the served model's name."""
        self._dispatcher = dispatcher
        self._model = model
        self._requests = requests
        self._formatter = formatter
        self._options = options or StreamOptions()
        self._id = formatter.id_prefix + secrets.token_hex(16)
        self._created = int(time.time())
        # What each request has used, once it has ended.
        self._used = [Usage()] * len(requests)

    async def whole(self, send: Send) -> None:
        """Sends one body once all outputs have ended; raises the first error of a request.

        The body is encoded while it is sent, so a large one is never in memory as a whole.
        """
        outputs = await self._dispatcher.collect(
            self._requests, lambda index, delta: self._formatter.take(index, self._requests[index], delta)
        )
        for index, delta in enumerate(outputs):
            self._record_usage(index, delta)
        usage = self._usage(sum(len(delta.token_ids) for delta in outputs))
        choices = (
            self._formatter.whole(index, request, delta)
            for index, (request, delta) in enumerate(zip(self._requests, outputs, strict=True))
        )
        document = {**self._head(self._formatter.whole_object), "choices": choices, "usage": usage}
        traces = [delta.trace for delta in outputs if delta.trace is not None]
        await send_json(send, document, answer_headers(self._requests[0], traces))

    async def stream(self, send: Send) -> None:
        """Sends server-sent events: one for each chunk, then the usage if asked for, then [DONE].

        The status is sent with the first event. So an error before any token is raised, and gets its own
        status; a later one ends the stream with an error event.
        """
        events = EventStream(send, answer_headers(self._requests[0]))
        tokens = 0
        head = self._event_head()
        try:
            async with self._dispatcher.stream(self._requests) as deltas:
                async for index, delta in deltas:
                    tokens += len(delta.token_ids)
                    self._record_usage(index, delta)
                    if choices := self._formatter.chunks(index, self._requests[index], delta):
                        end = f"]{self._chunk_usage(tokens)}}}\n\n"
                        await events.write(utf8("".join(f"{head}{one}{end}" for one in choices)))
            usage = (
                f'{head}],"usage":{encode(self._usage(tokens))}}}\n\n' if self._options.include_usage else ""
            )
            await events.write(f"{usage}data: [DONE]\n\n".encode(), last=True)
        except Exception as error:
            if not events.started:
                raise
            await events.send(openai_body(ended_by(error)))
            await events.write(b"", last=True)

    def _event_head(self) -> str:
        """The beginning of all events, up to their choices: it is encoded once."""
        return f'data: {encode(self._head(self._formatter.chunk_object))[:-1]},"choices":['

    def _head(self, kind: str) -> dict[str, object]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,
        }

    def _record_usage(self, index: int, delta: Delta) -> None:
        if delta.usage is not None:
            self._used[index] = delta.usage

    def _chunk_usage(self, completion: int) -> str:
        """The `usage` field of a chunk after others, as JSON: absent, null, or the usage so far, as the
        stream options ask."""
        if self._options.continuous_usage_stats:
            return f',"usage":{encode(self._usage(completion))}'
        return ',"usage":null' if self._options.include_usage else ""

    def _usage(self, completion: int) -> dict[str, object]:
        """Usage of the whole response. A prompt counts once for all of its outputs; as cached counts what
        every one of them found."""
        prompt, cached, least = 0, 0, 0
        for request, used in zip(self._requests, self._used, strict=True):
            if request.choice == 0:
                prompt += len(request.prompt_ids)
                cached, least = cached + least, used.cached_tokens
            least = min(least, used.cached_tokens)
        details = self._completion_details()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached + least},
            **({"completion_tokens_details": details} if details else {}),
        }

    def _completion_details(self) -> dict[str, int]:
        """Counts of output tokens: those of reasoning, and drafts from a prediction, where there is one."""
        reasoning, details = self._formatter.reasoning_tokens(), {}
        if reasoning is not None:
            details["reasoning_tokens"] = reasoning
        if self._requests[0].prediction is not None:
            for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
                details[name] = sum(getattr(used, name) for used in self._used)
        return details
