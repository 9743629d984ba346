"""The admin HTTP port of processes that serve no HTTP otherwise: /health, /ready and /metrics.

It needs no credentials and is for probes and Prometheus.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Protocol

from prometheus_client import CollectorRegistry

from services.common.observability.logs import get_log
from services.common.observability.metrics import render
from services.common.observability.small_http import (
    Answer,
    Request,
    Scrapes,
    SmallHttp,
    json_answer,
    status_answer,
)

log = get_log(__name__)


class Probes(Protocol):
    """The answers of `/health` and `/ready`."""

    def unhealthy(self) -> str | None:
        """Says why this process does not run as it should: "starting", or why it should be ended; None where
        it does."""

    def unready(self) -> str | None:
        """Says why this process should get no new work; None where it may."""


class AdminHttp:
    """Serves the three paths between `start` and `stop`."""

    def __init__(self, probes: Probes, registry: CollectorRegistry) -> None:
        self._probes = probes
        self._registry = registry
        self._http = SmallHttp(self._answer)
        self._scrapes = Scrapes()

    async def start(self, host: str, port: int) -> str:
        """Starts to serve; returns `host:port`. Raises BatonError(INVALID) if the address cannot be bound."""
        return await self._http.start(host, port)

    async def stop(self) -> None:
        """Closes the port and all connections."""
        await self._http.stop()

    async def _answer(self, request: Request) -> Answer:
        if request.method != "GET":
            return status_answer(HTTPStatus.NOT_FOUND)
        match request.path:
            case "/health":
                reason = self._probes.unhealthy()
                return json_answer(reason is None, {"status": "ok" if reason is None else reason})
            case "/ready":
                reason = self._probes.unready()
                ready = {"status": "ready"}
                return json_answer(
                    reason is None, ready if reason is None else {"status": "unavailable", "reason": reason}
                )
            case "/metrics":
                return await self._scrapes.make(lambda: self._metrics(request.headers.get("accept", "")))
        return status_answer(HTTPStatus.NOT_FOUND)

    def _metrics(self, accept: str) -> Answer:
        try:
            body, content_type = render(self._registry, accept)
        except Exception as error:
            log.warning("scrape_failed", kind=type(error).__name__)
            return status_answer(HTTPStatus.INTERNAL_SERVER_ERROR)
        return Answer(HTTPStatus.OK, body, content_type)
