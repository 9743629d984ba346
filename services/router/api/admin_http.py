"""The HTTP application of the admin port: metrics, liveness and readiness."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette

from services.router.api.health_routes import health_routes
from services.router.observability.metrics import metrics_route

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from services.router.lifecycle.readiness import Readiness


def admin_app(readiness: Readiness, registry: CollectorRegistry) -> Starlette:
    """Serves `/metrics`, `/health` and `/ready`."""
    app = Starlette(routes=[metrics_route(registry), *health_routes(readiness)])
    app.router.redirect_slashes = False
    return app
