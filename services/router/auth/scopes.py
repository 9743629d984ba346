"""The scopes that an API key needs for each route of the public ports and of the admin HTTP port: a route
that is not listed here does not start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from google.protobuf.descriptor import ServiceDescriptor
from starlette.routing import BaseRoute, Route

from baton.base.api_keys import KeyScope


class Access(Enum):
    """Routes that need no particular scope."""

    # Probes and version checks have no key.
    OPEN = "open"
    # Any valid key.
    ANY_KEY = "any key"


Rule = KeyScope | Access

# What records name in place of a path or method that is not served, since it may be anything.
UNKNOWN = "unknown"

UI_FILES = ("api.js", "charts.js", "cluster.js", "icon.svg", "page.css", "page.js", "prompt.js")

HTTP_RULES: dict[str, Rule] = {
    "/v1/completions": "generate",
    "/v1/chat/completions": "generate",
    "/v1/responses": "generate",
    "/v1/responses/{response_id}": "generate",
    "/v1/responses/{response_id}/input_items": "generate",
    "/tokenize": "generate",
    "/detokenize": "generate",
    "/v1/models": "models",
    "/v1/models/{model:path}": "models",
    "/metrics": "metrics",
    "/openapi.json": Access.ANY_KEY,
    "/docs": Access.ANY_KEY,
    "/health": Access.OPEN,
    "/ready": Access.OPEN,
    "/version": Access.OPEN,
}

# The page's files have no data in them; a browser sends no key with them.
ADMIN_HTTP_RULES: dict[str, Rule] = {
    "/metrics": Access.OPEN,
    "/health": Access.OPEN,
    "/ready": Access.OPEN,
    "/": Access.OPEN,
    **{f"/ui/{name}": Access.OPEN for name in UI_FILES},
    "/ui/status": "admin",
    "/ui/chat": "generate",
    "/ui/completion": "generate",
}

GRPC_RULES: dict[str, Rule] = {
    "/baton.v1.RouterService/Generate": "generate",
    "/baton.v1.RouterService/ListModels": "models",
    "/baton.v1.RouterService/GetStatus": "metrics",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access.ANY_KEY,
    "/grpc.health.v1.Health/Check": Access.OPEN,
    "/grpc.health.v1.Health/Watch": Access.OPEN,
    "/grpc.health.v1.Health/List": Access.OPEN,
}


def http_rule(route: BaseRoute, table: Mapping[str, Rule] = HTTP_RULES) -> tuple[str, Rule]:
    """The path of a route and its rule. Raises LookupError, which names the route, where it has none."""
    if not isinstance(route, Route) or route.path not in table:
        raise LookupError(f"auth.scopes has no rule for {route}")
    return route.path, table[route.path]


def check_grpc_rules(services: Sequence[ServiceDescriptor]) -> None:
    """Raises LookupError, which names the method, where one of these services' has no rule."""
    for service in services:
        for method in service.methods:
            name = f"/{service.full_name}/{method.name}"
            if name not in GRPC_RULES:
                raise LookupError(f"auth.scopes has no rule for {name}")


def grpc_rule(method: str) -> Rule:
    """The rule of a method. One that is not listed is not served, and it takes a key to get that answer."""
    return GRPC_RULES.get(method, Access.ANY_KEY)
