"""HTTP connections that are kept alive between requests."""

from __future__ import annotations

from starlette.applications import Starlette

from services.router.http.server import HttpServer


def test_an_idle_connection_is_the_clients_to_close() -> None:
    """Load balancers keep one for 60 s, and may send a request just before that."""
    assert HttpServer(Starlette()).connections.limits.idle_timeout_s > 60
