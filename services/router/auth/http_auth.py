"""Refuses HTTP requests without an API key that permits them: 401 or 403 with OpenAI's error body."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import BatonError, ErrorKind
from services.router.auth.keys import Keys
from services.router.auth.scopes import Access, HttpRules
from services.router.http.errors import error_response
from services.router.tenants.caller import Caller
from services.router.tenants.current import current_caller


class HttpAuth:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, keys: Keys, rules: HttpRules) -> None:
        self._app = app
        self._keys = keys
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller | None = None
        route, rule = self._rules.of(scope["path"])
        if rule is not Access.OPEN:
            given = Headers(scope=scope).getlist("authorization")
            try:
                # Several are ambiguous: a proxy may have checked another one.
                caller = self._keys.authenticate(given[0] if len(given) == 1 else None, "http", rule, route)
            except BatonError as error:
                response = error_response(error)
                if error.kind is ErrorKind.UNAUTHENTICATED:
                    response.headers["www-authenticate"] = "Bearer"
                return await response(scope, receive, send)
        current_caller.set(caller)
        await self._app(scope, receive, send)
