"""Delimits messages of HTTP/1.x where uvicorn does it otherwise than their peers can read."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_OFFER = frozenset({b"upgrade", b"http2-settings"})


def without_offer(
    method: bytes, target: bytes, version: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> bytes:
    """The head of a request as if it had not offered another protocol (RFC 9110, 7.8)."""
    lines = [method + b" " + target + b" HTTP/" + version]
    for name, value in headers:
        if name == b"connection":
            options = [one.strip() for one in value.split(b",")]
            value = b", ".join(one for one in options if one.lower() not in _OFFER)
        if name not in _OFFER:
            lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])


def unchunked(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The application for a client of HTTP/1.0, which knows no chunks: the end of the connection ends a body
    whose length is not known at its beginning."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        unframed = False

        async def send_unchunked(message: Message) -> None:
            nonlocal unframed
            if message["type"] == "http.response.start":
                unframed = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if unframed:
                    cycle.chunked_encoding = False
            elif unframed:  # uvicorn counts what is left of the length
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    cycle.waiting_for_100_continue = False
    return serve
