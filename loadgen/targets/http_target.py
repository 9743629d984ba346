"""Sends requests to any server that streams completions in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from loadgen.common.errors import LoadgenError
from loadgen.common.record import Outcome, Record
from loadgen.common.settings import TargetSettings
from loadgen.targets.http_connection import ConnectionPool
from loadgen.targets.sse import EventReader
from loadgen.targets.target import Answer, Failure, Payload, Request, headers_of, temperature_of

_LONGEST_ERROR = 64 * 1024
# Fields of a delta that carry output as text; servers differ in the name of reasoning.
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
# Keys that carry calls of functions, which are output as well.
_CALLS = ("tool_calls", "function_call")
_LONGEST_NAME = 40
# Keys that carry no output. Whatever else a delta has may be some that is not counted.
_OTHERS = frozenset({"role", "name", "id", "index", "type", "obfuscation"})


class HttpTarget:
    """Streams /v1/completions, or /v1/chat/completions for chats."""

    def __init__(self, settings: TargetSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._pool = ConnectionPool(settings.url, clock, settings.tls)
        self._chat = settings.form == "chat"
        self._head = self._pool.head(
            "POST",
            "/v1/chat/completions" if self._chat else "/v1/completions",
            "Content-Type: application/json\r\nAccept: text/event-stream\r\n",
        )

    async def connect(self) -> None:
        """Opens one connection. Raises LoadgenError where the server does not answer."""
        try:
            self._pool.give(await self._pool.take())
        except Failure as failure:
            raise LoadgenError(f"no answer from {self._settings.url} ({failure.detail})") from None

    def prepare(self, request: Request) -> Payload:
        """The whole request, head and body."""
        header_lines = "".join(f"{name}: {value}\r\n" for name, value in headers_of(request, self._settings))
        body = json.dumps(self._body(request), separators=(",", ":")).encode()
        return Payload(f"{self._head}{header_lines}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def send(self, payload: Payload, record: Record, answer: Answer) -> None:
        """Makes one exchange. Raises Failure with `HTTP_<status>` if the server refused."""
        listener = StreamListener(record, answer, self._clock, chat=self._chat)
        connection = await self._pool.take()
        try:
            await connection.exchange(payload.data, listener)
        finally:
            self._pool.give(connection)
        listener.check_end()

    async def close(self) -> None:
        """Closes the connections to the target."""
        await self._pool.close()

    def _body(self, request: Request) -> dict[str, Any]:
        settings = self._settings
        temperature = temperature_of(request, settings)
        body: dict[str, Any] = {"model": settings.model, "stream": True, "temperature": temperature}
        if isinstance(request.prompt, tuple):
            body["messages"] = [{"role": one.role, "content": one.content} for one in request.prompt]
        else:
            body["prompt"] = request.prompt
        body["max_tokens"] = request.output_tokens
        body["stream_options"] = {"include_usage": True}
        if settings.extensions != "none" and settings.ignore_eos:
            body["ignore_eos"] = True
        if settings.extensions == "all":
            body["return_token_ids"] = True
        if request.klass.priority is not None:
            body["priority"] = request.klass.priority
        return body | settings.extra_body


class StreamListener:
    """Parses the events of one response into its record."""

    def __init__(self, record: Record, answer: Answer, clock: Callable[[], float], *, chat: bool) -> None:
        self._record = record
        self._answer = answer
        self._clock = clock
        self._chat = chat
        self._status = 0
        self._events = EventReader()
        self._error = bytearray()
        self._streams = False
        self._has_ids = False

    def on_status(self, status: int, headers: Mapping[str, str]) -> None:
        """Checks whether the response is a stream."""
        self._status = status
        self._streams = headers.get("content-type", "").startswith("text/event-stream")

    def on_body(self, data: bytes, late: float | None) -> None:
        """Records the time, then parses the data."""
        now = self._clock()
        if self._status != 200 or not self._streams:
            self._error += data[: _LONGEST_ERROR - len(self._error)]
            return
        try:
            for event in self._events.feed(data):
                if event.data != b"[DONE]":
                    self._chunk(event.name, json.loads(event.data), now, late)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise Failure(Outcome.MALFORMED, f"an event: {type(error).__name__}") from None

    def check_end(self) -> None:
        """Raises Failure where the response is invalid or incomplete."""
        if self._status != 200:
            raise Failure(f"HTTP_{self._status}", _error_text(bytes(self._error)))
        if not self._streams:
            raise Failure(Outcome.MALFORMED, "the answer is no stream of events")
        if not self._record.finish_reason:
            raise Failure(Outcome.NO_FINISH)
        if not self._has_ids and self._record.usage_output:
            self._record.token_times = spread(self._record.token_times, self._record.usage_output)

    def _chunk(self, name: str, chunk: dict[str, Any], now: float, late: float | None) -> None:
        if name == "error" or "error" in chunk:
            raise Failure(Outcome.STREAM_ERROR, _message(chunk))
        record = self._record
        record.messages += 1
        for choice in chunk["choices"]:
            text = self._text(choice)
            ids = choice.get("token_ids")
            # Without ids a chunk with output counts as one token, until usage reports the number.
            count = len(ids) if ids is not None else bool(text) or self._calls(choice)
            if count:
                record.note_tokens(count, now, late)
            elif self._chat and not record.token_times and not record.uncounted:
                record.uncounted = _uncounted(choice["delta"])
            if ids:
                self._has_ids = True
                self._answer.ids.extend(ids)
            if text:
                self._answer.text.append(text)
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
        if usage := chunk.get("usage"):
            record.usage_input = int(usage["prompt_tokens"])
            record.usage_output = int(usage["completion_tokens"])
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            record.usage_cached = None if cached is None else int(cached)

    def _text(self, choice: dict[str, Any]) -> str:
        """A role alone is no token, although some tools count it."""
        if not self._chat:
            return choice.get("text") or ""
        delta = choice["delta"]
        return next((text for name in _TEXTS if (text := delta.get(name))), "")

    def _calls(self, choice: dict[str, Any]) -> bool:
        """True if the delta has a part of a call."""
        return self._chat and any(choice["delta"].get(name) for name in _CALLS)


def _uncounted(delta: dict[str, Any]) -> str:
    """The first field of a delta that may carry output of another kind; empty if there is none."""
    return next((name for name, value in delta.items() if value and name not in _OTHERS), "")[:_LONGEST_NAME]


def spread(times: list[float], count: int) -> list[float]:
    """Times for `count` tokens that arrived in several chunks: the first and last as they are, the others
    distributed evenly over the chunks.
    """
    if not times or len(times) == count or count < 1:
        return times
    if count == 1:
        return times[:1]
    last = len(times) - 1
    return [times[round(place * last / (count - 1))] for place in range(count)]


def _error_text(body: bytes) -> str:
    try:
        return _message(json.loads(body))
    except ValueError:
        return ""


def _message(document: object) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""
