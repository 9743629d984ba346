"""One answer of either completion API: its requests run side by side, each a choice with its index."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Protocol

from baton.errors import BatonError
from services.common.errors import openai_body
from services.router.formats.json_pieces import encode, send_json
from services.router.formats.openai_fields import StreamOptions
from services.router.lifecycle.choices import running, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Send

    from services.router.lifecycle.service import Service
    from services.router.request.request import Delta, Request

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Words(Protocol):
    """How one API words what came."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, index: int, request: Request, delta: Delta) -> dict[str, object]:
        """One choice of a whole answer. Its long lists may be iterators."""
        ...

    def chunks(self, index: int, request: Request, delta: Delta) -> list[dict[str, object]]:
        """The choices of the chunks that tell this delta, in order."""
        ...


class Answer:
    """Runs admitted requests and has their output worded; cancelling it cancels them all."""

    def __init__(
        self,
        service: Service,
        requests: Sequence[Request],
        words: Words,
        options: StreamOptions | None = None,
    ) -> None:
        self._service = service
        self._requests = requests
        self._words = words
        self._options = options or StreamOptions()
        self._id = words.id_prefix + secrets.token_hex(16)
        self._created = int(time.time())
        # Prompt tokens that each of the requests found cached, once it has ended.
        self._cached = [0] * len(requests)

    async def whole(self, send: Send) -> None:
        """The answer in one body, once all outputs have ended; raises the first failure of a request.

        The body is encoded while it is sent, so that a large one never lies in memory as a whole.
        """
        outputs = [output.delta() for output in await whole(self._service, self._requests)]
        for index, delta in enumerate(outputs):
            self._note(index, delta)
        usage = self._usage(sum(len(delta.token_ids) for delta in outputs))
        choices = (
            self._words.whole(index, request, delta)
            for index, (request, delta) in enumerate(zip(self._requests, outputs, strict=True))
        )
        document = {**self._head(self._words.whole_object), "choices": choices, "usage": usage}
        await send_json(send, document)

    async def stream(self, send: Send) -> None:
        """Server-sent events, one a chunk, then usage if asked for, then [DONE].

        The status goes out with the first event, so a failure before any token has its own
        status (it is raised); a later one ends the stream with an error event.
        """
        events = _Events(send)
        tokens = 0
        head = self._head(self._words.chunk_object)
        try:
            async with running(self._service, self._requests) as deltas:
                async for index, delta in deltas:
                    tokens += len(delta.token_ids)
                    self._note(index, delta)
                    for choice in self._words.chunks(index, self._requests[index], delta):
                        await events.tell({**head, "choices": [choice], **self._chunk_usage(tokens)})
            if self._options.include_usage:
                await events.tell({**head, "choices": [], "usage": self._usage(tokens)})
            await events.end(b"data: [DONE]\n\n")
        except BatonError as error:
            if not events.started:
                raise
            await events.tell(openai_body(error))
            await events.end(b"")

    def _head(self, kind: str) -> dict[str, object]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.intake.served_name,
            "system_fingerprint": None,
        }

    def _note(self, index: int, delta: Delta) -> None:
        if delta.usage is not None:
            self._cached[index] = delta.usage.cached_tokens

    def _chunk_usage(self, completion: int) -> dict[str, object]:
        """What a chunk says of usage: nothing, null, or where it was asked for the usage so far."""
        if self._options.continuous_usage_stats:
            return {"usage": self._usage(completion)}
        return {"usage": None} if self._options.include_usage else {}

    def _usage(self, completion: int) -> dict[str, object]:
        """A prompt counts once, however many outputs it has; as cached what all of them found."""
        prompt, cached, least = 0, 0, 0
        for request, found in zip(self._requests, self._cached, strict=True):
            if request.choice == 0:
                prompt += len(request.prompt_ids)
                cached, least = cached + least, found
            least = min(least, found)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached + least},
        }


class _Events:
    """A stream of server-sent events; its status goes out with the first."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def tell(self, document: object) -> None:
        line = encode(document, default=list)
        await self._start()
        await self._body(f"data: {line}\n\n".encode(), more=True)

    async def end(self, rest: bytes) -> None:
        await self._start()
        await self._body(rest, more=False)

    async def _start(self) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
