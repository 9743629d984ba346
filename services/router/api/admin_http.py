"""The admin HTTP application: metrics, liveness and readiness, on a port that is not the public one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette

from services.router.api.health_routes import health_routes
from services.router.observability.metrics import metrics_route

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from services.router.lifecycle.service import Service


def admin_app(service: Service, registry: CollectorRegistry) -> Starlette:
    """Serves `/metrics`, `/health` and `/ready`, and nothing that changes the router."""
    app = Starlette(routes=[metrics_route(registry), *health_routes(service)])
    app.router.redirect_slashes = False
    return app
