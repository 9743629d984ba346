"""`GET /health` and `GET /ready`, on the public and the admin HTTP port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from services.router.lifecycle.readiness import Readiness


def health_routes(readiness: Readiness) -> list[Route]:
    """Routes of liveness and readiness probes.

    `/health` is 200 as long as the event loop runs, whatever the state of the workers: restart the process if
    it fails. `/ready` is 200 while a request would be served, else 503 with a reason.
    """

    async def ready(request: HttpRequest) -> Response:
        reason = readiness.reason()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "unavailable", "reason": reason}, 503)

    return [
        Route("/health", JSONResponse({"status": "ok"}), methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
    ]
