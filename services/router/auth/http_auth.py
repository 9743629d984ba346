"""Refuses HTTP requests without an API key: 401 with OpenAI's error body."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import BatonError
from services.router.auth.keys import Keys
from services.router.http.errors import error_response
from services.router.tenants.account import TenantAccount
from services.router.tenants.current import current_tenant

# Probes and version checks have no key.
_OPEN = frozenset({"/health", "/ready", "/version"})


class HttpAuth:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant: TenantAccount | None = None
        if scope["path"] not in _OPEN:
            given = Headers(scope=scope).getlist("authorization")
            try:
                # Several are ambiguous: a proxy may have checked another one.
                tenant = self._keys.authenticate(given[0] if len(given) == 1 else None, "http").tenant
            except BatonError as error:
                response = error_response(error)
                response.headers["www-authenticate"] = "Bearer"
                return await response(scope, receive, send)
        current_tenant.set(tenant)
        await self._app(scope, receive, send)
