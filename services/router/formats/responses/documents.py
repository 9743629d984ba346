"""POST /v1/responses: the response object, and the events of a stream.

Logprobs come with the whole response, or with the deltas of a stream; the last events of a stream repeat its
text but not its logprobs. For an output with calls or reasoning they are those of all its tokens, and come
with its text.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.router.formats.openai.logprobs import chat_logprobs
from services.router.formats.responses.body import ResponsesBody
from services.router.formats.responses.items import Document, Event, OutputItems
from services.router.request.request import Delta, Finish, Request
from services.router.text.token_texts import TokenTexts
from services.router.tools.output_parser import OutputParser, OutputStructure
from services.router.tools.pieces import Content


class ResponseDocuments:
    """The documents of one response."""

    def __init__(
        self,
        body: ResponsesBody,
        request: Request,
        token: str,
        created: int,
        texts: TokenTexts,
        *,
        stored: bool = False,
    ) -> None:
        """`token`: the random part of the ids; `created`: seconds of Unix time; `stored`: whether the
        response will be stored."""
        self._body = body
        self._request = request
        self.id = f"resp_{token}"
        self._stored = stored
        self._created = created
        self._texts = texts
        self._events = 0
        self._items = OutputItems(token)
        self._parser = OutputParser(request.structure or OutputStructure())

    def take(self, delta: Delta) -> None:
        """Reads more of an output that is not streamed, as it comes."""
        for _ in self._pieces(delta, with_logprobs=False):
            pass

    def whole(self, delta: Delta, completed: int) -> Document:
        """The response to a request that is not streamed, once `take` had all of it, without logprobs (see
        `with_logprobs`)."""
        assert delta.finish is not None
        status = _status(delta.finish)
        for _ in self._items.close(status):
            pass
        return self._ended(delta, len(delta.token_ids), completed)

    def with_logprobs(self, whole: Document, delta: Delta) -> Document:
        """Returns a whole response as it is sent. Its lists are iterators (see `json_pieces`)."""
        items = [
            {**item, "content": iter(item["content"])} if "content" in item else item
            for item in self._items.items
        ]
        message = next((item for item in self._items.items if item["type"] == "message"), None)
        if message is not None:
            message["content"][0]["logprobs"] = self._logprobs(delta)
        return {**whole, "output": iter(items)}

    def opening(self) -> list[Document]:
        """The events before the first item."""
        started = self._response("in_progress", [])
        return [
            self._event("response.created", response=started),
            self._event("response.in_progress", response=started),
        ]

    def delta(self, delta: Delta) -> Iterator[Document]:
        """The events of more text, or of tokens whose logprobs are asked for. Use each before the next."""
        for kind, fields in self._pieces(delta, with_logprobs=True):
            yield self._event(kind, **fields)

    def closing(self, last: Delta) -> Iterator[Document]:
        """The events after the last text but the very last. `last`: the delta that ended the output."""
        assert last.finish is not None
        for kind, fields in self._items.close(_status(last.finish)):
            yield self._event(kind, **fields)

    def last(self, last: Delta, tokens: int, completed: int) -> Document:
        """The last event, with the response. `tokens`: of the output."""
        response = self._ended(last, tokens, completed)
        return self._event(f"response.{response['status']}", response=response)

    def _ended(self, last: Delta, tokens: int, completed: int) -> Document:
        """The response once its items are closed."""
        assert last.finish is not None
        return self._response(
            _status(last.finish),
            self._items.items,
            finish=last.finish,
            usage=self._usage(last, tokens),
            completed=completed,
        )

    def _pieces(self, delta: Delta, *, with_logprobs: bool) -> Iterator[Event]:
        """The events of a delta's pieces. Its logprobs come with its first text."""
        logprobs = self._logprobs(delta) if with_logprobs and delta.token_ids else ()
        last = delta.finish is not None
        for piece in self._parser.push(delta.text, last=last, offsets=delta.offsets):
            if isinstance(piece, Content):
                yield from self._items.push(piece, logprobs)
                logprobs = ()
            else:
                yield from self._items.push(piece)
        if logprobs:
            yield from self._items.push(Content(""), logprobs)
        if delta.finish is not None and not self._items.items:
            yield from self._items.open_message()

    def failed(self, message: str) -> Document:
        """The event that ends a stream which fails after its first event."""
        response = self._response("failed", [])
        response["error"] = {"code": "server_error", "message": message}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: object) -> Document:
        number, self._events = self._events, self._events + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _response(
        self,
        status: str,
        output: object,
        finish: Finish | None = None,
        usage: Document | None = None,
        completed: int | None = None,
    ) -> Document:
        body = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": completed if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if finish is Finish.LENGTH else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": body.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": self._stored,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": _text_format(body), "verbosity": "medium"},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.echo() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
            "metadata": {},
        }

    def _usage(self, last: Delta, count: int) -> Document:
        prompt = len(self._request.prompt_ids)
        cached = last.usage.cached_tokens if last.usage is not None else 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens or 0},
            "total_tokens": prompt + count,
        }

    def _logprobs(self, delta: Delta) -> object:
        """The logprobs of the delta's tokens as an iterator; an empty list if they are not asked for."""
        if not self._request.wants_logprobs:
            return []
        return chat_logprobs(self._texts, delta.token_ids, delta.logprobs)["content"]


def _text_format(body: ResponsesBody) -> Document:
    """The text's format as it was asked for."""
    given = body.text.format if body.text is not None else None
    return given or {"type": "text"}


def _status(finish: Finish) -> str:
    return "incomplete" if finish is Finish.LENGTH else "completed"
