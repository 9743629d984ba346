"""Refuses requests that a web page may have a browser send: foreign Host names, and bodies other than JSON;
and what no client means: control characters in a path, and a request to no host or to several.

A page may send a POST with a form's content type to 127.0.0.1 without a preflight request, and may read
responses of its own domain that it resolves to 127.0.0.1 (DNS rebinding). So a listener on loopback serves
only the names of loopback and configured ones, and bodies must be declared as JSON. There are no CORS
headers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.base.addresses import is_loopback
from baton.base.errors import BatonError, ErrorKind
from services.router.http.errors import error_response

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# RFC 9110, 7.2; empty where the target has no authority.
_HOST_FIELD = re.compile(r"(\[[0-9a-f:.%]+\]|[\w.~!$&'()*+,;=%-]*)(:\d*)?", re.ASCII | re.IGNORECASE)
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s\[\]:/@]+)(?::\d+)?", re.ASCII)
_ANY = "*"
_JSON = "application/json"
_IDENTITY = "identity"
# Addresses that stand for all interfaces; a web page may use them to reach loopback.
_UNSPECIFIED = frozenset({"0.0.0.0", "::", "[::]"})


class HttpGuard:
    """ASGI middleware that refuses foreign hosts, bodies that are not JSON, and targets that no client
    means."""

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str] = ()) -> None:
        """`allowed_hosts`: host names, `.example.com` for a domain and its subdomains, `*` for any."""
        self._app = app
        self._allowed = tuple(name.lower().rstrip(".") for name in allowed_hosts)
        self._own = ""
        self._checks_host = bool(allowed_hosts) and _ANY not in allowed_hosts

    def listens_on(self, host: str) -> None:
        """Sets the listener's address: on loopback only its names are served, unless others are
        configured. The address itself is always served: probes name it, and no page's domain is equal to
        it."""
        self._own = "" if host in _UNSPECIFIED else host.lower().strip("[]")
        if is_loopback(host) and not self._allowed:
            self._checks_host = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        refusal = self._misdirected(scope, headers.getlist("host")) or _unread(scope["method"], headers)
        await (refusal or self._app)(scope, receive, send)

    def _misdirected(self, scope: Scope, hosts: Sequence[str]) -> Response | None:
        """The refusal of a request to a host that is not served, to none or to several, or to a path with
        control characters."""
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
            return error_response(BatonError(ErrorKind.INVALID, "a request has one Host header"))
        if self._checks_host and not all(map(self._is_allowed, hosts)):
            return error_response(BatonError(ErrorKind.FORBIDDEN, "this Host is not served here"))
        if not all(map(_HOST_FIELD.fullmatch, hosts)):
            return error_response(BatonError(ErrorKind.INVALID, "the Host header is not valid"))
        if _CONTROL.search(scope["path"]):
            return error_response(BatonError(ErrorKind.INVALID, "the path has a control character"))
        return None

    def _is_allowed(self, host: str) -> bool:
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match[1].rstrip(".")
        if is_loopback(name) or name.strip("[]") == self._own:
            return True
        return any(
            name == allowed.removeprefix(".") or (allowed.startswith(".") and name.endswith(allowed))
            for allowed in self._allowed
        )


def _unread(method: str, headers: Headers) -> Response | None:
    """The refusal of a body that is not read, by its headers."""
    if method != "POST":
        return None
    if headers.get("content-encoding", _IDENTITY).lower() != _IDENTITY:
        error = BatonError(ErrorKind.INVALID, "bodies must not be compressed")
        return error_response(error, 415)
    content_type = headers.get("content-type")
    if content_type is None:
        if "origin" in headers:  # a browser: curl and API clients send none
            return error_response(BatonError(ErrorKind.FORBIDDEN, "a content-type is required"))
    elif content_type.partition(";")[0].strip().lower() != _JSON:
        error = BatonError(ErrorKind.INVALID, f"the content-type must be {_JSON}")
        return error_response(error, 415)
    return None
