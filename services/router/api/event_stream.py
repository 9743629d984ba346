"""A stream of server-sent events."""

from __future__ import annotations

from starlette.types import Send

from services.router.formats.json_bodies import Headers, encode_with_lists, utf8

_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """The status and the headers are sent with the first event."""

    def __init__(self, send: Send, more_headers: Headers = ()) -> None:
        self._send = send
        self._headers = [*_HEADERS, *more_headers]
        self.started = False

    async def send(self, document: object, event: str | None = None) -> None:
        """Sends a document, whose iterators are lists; `event`: the name of its event, if it has one."""
        named = "" if event is None else f"event: {event}\n"
        await self.write(utf8(f"{named}data: {encode_with_lists(document)}\n\n"))

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Sends bytes; `last` ends the response."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
