"""`GET /health` and `GET /ready`, the same on the public and on the admin HTTP port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from services.router.lifecycle.service import Service


def health_routes(service: Service) -> list[Route]:
    """Liveness and readiness.

    `/health` is 200 as long as the event loop answers, whatever the workers do: a failure means that the
    process should be restarted. `/ready` is 200 while a request would be served, else 503 with a reason.
    """

    async def health(request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: HttpRequest) -> Response:
        reason = service.unready_reason()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "unavailable", "reason": reason}, 503)

    return [Route("/health", health, methods=["GET"]), Route("/ready", ready, methods=["GET"])]
