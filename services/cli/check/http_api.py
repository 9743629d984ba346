"""A client of the HTTP API with deadlines, made of the standard library, which every image has."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from baton.base.errors import BatonError, ErrorKind

_MOST_BYTES = 1024 * 1024


class _TlsConnection(http.client.HTTPSConnection):
    """Verifies a name that may differ from the host that it connects to."""

    def __init__(
        self, host: str, port: int | None, context: ssl.SSLContext, name: str, timeout: float
    ) -> None:
        super().__init__(host, port, context=context, timeout=timeout)
        self._verified = context
        self._name = name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._verified.wrap_socket(self.sock, server_hostname=self._name)


class HttpApi:
    """One request a connection. Every method raises BatonError(UNAVAILABLE) where the server does not answer
    as it should by `deadline`, in monotonic seconds."""

    def __init__(
        self, url: str, api_key: str | None, context: ssl.SSLContext | None, server_name: str | None
    ) -> None:
        """`context`: of TLS, where the URL is https."""
        self._parts = urlsplit(url)
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._context = context
        self._name = server_name or self._parts.hostname or ""

    def get(self, path: str, deadline: float) -> dict[str, Any]:
        """The JSON object of a GET."""
        return _json(b"".join(self._lines("GET", path, None, deadline)))

    def events(self, path: str, body: Mapping[str, object], deadline: float) -> Iterator[dict[str, Any]]:
        """The JSON objects of a streamed POST, which must end with `[DONE]`."""
        with contextlib.closing(self._lines("POST", path, body, deadline)) as lines:
            for line in lines:
                name, _, data = line.partition(b":")
                if name != b"data":
                    continue
                if data.strip() == b"[DONE]":
                    return
                yield _json(data)
        raise BatonError(ErrorKind.UNAVAILABLE, "the stream ended before it was complete")

    def _lines(
        self, method: str, path: str, body: Mapping[str, object] | None, deadline: float
    ) -> Generator[bytes, None, None]:
        connection = self._connection(_left(deadline))
        headers = self._headers | ({"content-type": "application/json"} if body is not None else {})
        try:
            connection.connect()
            stream = connection.sock
            data = json.dumps(body) if body is not None else None
            connection.request(method, self._parts.path + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise BatonError(ErrorKind.UNAVAILABLE, _refusal(response.status, response.read(_MOST_BYTES)))
            while line := response.readline(_MOST_BYTES):
                if not response.isclosed():
                    stream.settimeout(_left(deadline))
                yield line
        except ssl.SSLError as error:
            raise BatonError(ErrorKind.UNAVAILABLE, f"TLS: {error.reason or error}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise BatonError(ErrorKind.UNAVAILABLE, reason) from None
        finally:
            connection.close()

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._context is None:
            return http.client.HTTPConnection(host, port, timeout=timeout)
        return _TlsConnection(host, port, self._context, self._name, timeout)


def _json(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise BatonError(ErrorKind.UNAVAILABLE, "the answer is not a JSON object")
    return document


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise BatonError(ErrorKind.UNAVAILABLE, "no answer in time")
    return left


def _refusal(status: int, body: bytes) -> str:
    """The status, and the message or reason of the body if it has one."""
    try:
        document = json.loads(body)
        error = document.get("error")
        reason = error["message"] if error else document["reason"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"status {status}"
    return f"status {status}: {' '.join(str(reason).split())}"
