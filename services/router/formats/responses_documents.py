"""POST /v1/responses: the response object, and the events of a stream.

Logprobs come with the whole response, or with the deltas of a stream; the last events of a stream repeat its
text but not its logprobs.
"""

from __future__ import annotations

from typing import Any

from services.router.formats.openai_logprobs import chat_logprobs
from services.router.formats.responses_body import ResponsesBody
from services.router.request.request import Delta, Finish, Request
from services.router.text.token_texts import TokenTexts

Document = dict[str, Any]


class ResponseDocuments:
    """The documents of one response."""

    def __init__(
        self, body: ResponsesBody, request: Request, token: str, created: int, texts: TokenTexts
    ) -> None:
        """`token`: the random part of the ids; `created`: seconds of Unix time."""
        self._body = body
        self._request = request
        self._id, self._item_id = f"resp_{token}", f"msg_{token}"
        self._created = created
        self._texts = texts
        self._events = 0

    def whole(self, delta: Delta, completed: int) -> Document:
        """The response to a request that is not streamed. Its lists are iterators (see `json_pieces`)."""
        assert delta.finish is not None
        item = self._item(delta.text, _status(delta.finish), self._logprobs(delta))
        item["content"] = iter(item["content"])
        return self._response(
            _status(delta.finish),
            iter([item]),
            finish=delta.finish,
            usage=self._usage(delta),
            completed=completed,
        )

    def opening(self) -> list[Document]:
        """The events before the first text."""
        started = self._response("in_progress", [])
        part = _text_part("")
        return [
            self._event("response.created", response=started),
            self._event("response.in_progress", response=started),
            self._event("response.output_item.added", output_index=0, item=self._item(None, "in_progress")),
            self._event("response.content_part.added", **self._place(), part=part),
        ]

    def delta(self, delta: Delta) -> Document:
        """The event of more text, or of tokens whose logprobs are asked for."""
        logprobs = self._logprobs(delta)
        return self._event("response.output_text.delta", **self._place(), delta=delta.text, logprobs=logprobs)

    def closing(self, text: str, last: Delta, tokens: int, completed: int) -> list[Document]:
        """The events after the last text. `last`: the delta that ended the output, of `tokens` in all."""
        assert last.finish is not None
        status = _status(last.finish)
        item = self._item(text, status)
        response = self._response(
            status, [item], finish=last.finish, usage=self._usage(last, tokens), completed=completed
        )
        return [
            self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=_text_part(text)),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{status}", response=response),
        ]

    def failed(self, message: str) -> Document:
        """The event that ends a stream which fails after its first event."""
        response = self._response("failed", [])
        response["error"] = {"code": "server_error", "message": message}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: object) -> Document:
        number, self._events = self._events, self._events + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _place(self) -> Document:
        """Where text goes: there is one item, of one part."""
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, text: str | None, status: str, logprobs: object = ()) -> Document:
        content = [] if text is None else [_text_part(text, logprobs)]
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

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
            "id": self._id,
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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": _text_format(body), "verbosity": "medium"},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
            "metadata": {},
        }

    def _usage(self, last: Delta, tokens: int | None = None) -> Document:
        prompt = len(self._request.prompt_ids)
        count = len(last.token_ids) if tokens is None else tokens
        cached = last.usage.cached_tokens if last.usage is not None else 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + count,
        }

    def _logprobs(self, delta: Delta) -> object:
        """The logprobs of the delta's tokens as an iterator; an empty list if they are not asked for."""
        if not self._request.wants_logprobs:
            return []
        return chat_logprobs(self._texts, delta.token_ids, delta.logprobs)["content"]


def _text_format(body: ResponsesBody) -> Document:
    """As it was asked for."""
    given = body.text.format if body.text is not None else None
    return given or {"type": "text"}


def _text_part(text: str, logprobs: object = ()) -> Document:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def _status(finish: Finish) -> str:
    return "incomplete" if finish is Finish.LENGTH else "completed"
