"""Refuses HTTP requests without an API key that permits them: 401 or 403 with OpenAI's error body.

Each route asks for the key that its rule names, and so does what answers where there is no route. Routing
alone reads the path, so no spelling of one has a call authorised as another.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.datastructures import Headers, URLPath
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.base.errors import BatonError, ErrorKind
from services.router.auth.keys import Keys
from services.router.auth.scopes import UNKNOWN, Access, Rule, http_rule
from services.router.http.errors import error_response
from services.router.tenants.caller import Caller
from services.router.tenants.current import current_caller


def require_keys(app: Starlette, keys: Keys, table: Mapping[str, Rule]) -> None:
    """Makes every route of an application ask for keys by these rules. A path without a route takes a key to
    get that answer. Raises LookupError, which names the route, where one has no rule."""
    app.router.routes = [KeyedRoute(route, keys, table) for route in app.routes]
    app.router.default = KeyCheck(app.router.default, keys, UNKNOWN, Access.ANY_KEY)


class KeyCheck:
    """ASGI middleware: refuses calls without a key that satisfies the rule."""

    def __init__(self, app: ASGIApp, keys: Keys, route: str, rule: Rule) -> None:
        """`route`: the name under which refusals are recorded."""
        self._app = app
        self._keys = keys
        self._route = route
        self._rule = rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller | None = None
        if self._rule is not Access.OPEN:
            given = Headers(scope=scope).getlist("authorization")
            try:
                # Several are ambiguous: a proxy may have checked another one.
                only = given[0] if len(given) == 1 else None
                caller = self._keys.authenticate(only, "http", self._rule, self._route)
            except BatonError as error:
                response = error_response(error)
                if error.kind is ErrorKind.UNAUTHENTICATED:
                    response.headers["www-authenticate"] = "Bearer"
                return await response(scope, receive, send)
        current_caller.set(caller)
        await self._app(scope, receive, send)


class KeyedRoute(BaseRoute):
    """A route that checks the key of each call that it handles, of methods that it refuses too."""

    def __init__(self, route: BaseRoute, keys: Keys, table: Mapping[str, Rule]) -> None:
        """Raises LookupError, which names the route, where it has no rule."""
        self._route = route
        self._checked = KeyCheck(route.handle, keys, *http_rule(route, table))

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self._route.matches(scope)

    def url_path_for(self, name: str, /, **path_params: object) -> URLPath:
        return self._route.url_path_for(name, **path_params)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._checked(scope, receive, send)
