"""The response to POST /v1/responses, whole or streamed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from starlette.types import Send

from services.router.api.event_stream import EventStream
from services.router.conversations.record import stored_document
from services.router.formats.answer_headers import answer_headers
from services.router.formats.json_bodies import send_json
from services.router.formats.responses.body import ResponsesBody
from services.router.formats.responses.documents import ResponseDocuments
from services.router.formats.responses.items import Document
from services.router.http.errors import ended_by
from services.router.lifecycle.dispatcher import Dispatcher
from services.router.request.request import Request
from services.router.text.token_texts import TokenTexts

# Takes the response's id and its document as JSON.
Keep = Callable[[str, bytes], None]


class ResponsesAnswer:
    """Runs one admitted request and formats its output. Cancelling a method cancels the request."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        body: ResponsesBody,
        request: Request,
        texts: TokenTexts,
        keep: Keep | None = None,
    ) -> None:
        """`keep` stores the response; None: it is not to be stored."""
        self._dispatcher = dispatcher
        self._request = request
        self._keep = keep
        token, created = secrets.token_hex(16), int(time.time())
        self._documents = ResponseDocuments(body, request, token, created, texts, stored=keep is not None)

    async def whole(self, send: Send) -> None:
        """Sends one body once the output has ended; raises the request's error."""
        (delta,) = await self._dispatcher.collect(
            [self._request], lambda _, delta: self._documents.take(delta)
        )
        traces = [delta.trace] if delta.trace is not None else []
        document = self._documents.whole(delta, int(time.time()))
        self._ended(document)
        document = self._documents.with_logprobs(document, delta)
        await send_json(send, document, answer_headers(self._request, traces))

    async def stream(self, send: Send) -> None:
        """Sends the events of OpenAI's Responses API, the first of them with the first token.

        So an error before any token is raised, and gets its own status; a later one ends the stream with
        `response.failed`.
        """
        events = EventStream(send, answer_headers(self._request))
        try:
            await self._run(events)
        except Exception as error:
            if not events.started:
                raise
            await _send(events, self._documents.failed(ended_by(error).message))
        await events.write(b"", last=True)

    async def _run(self, events: EventStream) -> None:
        tokens = 0
        async with self._dispatcher.stream([self._request]) as deltas:
            async for _, delta in deltas:
                if not events.started:
                    for document in self._documents.opening():
                        await _send(events, document)
                tokens += len(delta.token_ids)
                for document in self._documents.delta(delta):
                    await _send(events, document)
                if delta.finish is not None:
                    for document in self._documents.closing(delta):
                        await _send(events, document)
                    last = self._documents.last(delta, tokens, int(time.time()))
                    self._ended(last["response"])
                    await _send(events, last)

    def _ended(self, document: Document) -> None:
        """Has the response stored while its end is sent: the client may refer to it at once."""
        if self._keep is not None:
            self._keep(self._documents.id, stored_document(document))


async def _send(events: EventStream, document: Document) -> None:
    await events.send(document, event=document["type"])
