"""The metrics port of a worker: Prometheus' own endpoint, behind a server that strangers cannot occupy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus

from prometheus_client import CollectorRegistry, make_wsgi_app

from services.common.observability.logs import get_log
from services.common.observability.metrics import paced
from services.common.observability.small_http import Answer, Request, Scrapes, SmallHttp, status_answer

_log = get_log(__name__)

WsgiApp = Callable[[dict[str, str], Callable[[str, list[tuple[str, str]]], object]], Iterable[bytes]]


class MetricsServer:
    """Serves a registry between `start` and `stop`; one scrape at a time, on a thread."""

    def __init__(self) -> None:
        self._http = SmallHttp(self._answer)
        self._scrapes = Scrapes()
        self._app: WsgiApp | None = None

    async def start(self, registry: CollectorRegistry, host: str, port: int) -> str:
        """Serves the registry; returns `host:port`. BatonError(INVALID) where the port is taken."""
        self._app = make_wsgi_app(paced(registry))
        return await self._http.start(host, port)

    async def stop(self) -> None:
        """Closes the port of the metrics."""
        await self._http.stop()

    async def _answer(self, request: Request) -> Answer:
        if request.method != "GET":
            return status_answer(HTTPStatus.METHOD_NOT_ALLOWED)
        return await self._scrapes.make(lambda: self._scrape(request))

    def _scrape(self, request: Request) -> Answer:
        """Calls the application as a WSGI server does."""
        assert self._app is not None
        environ = {
            "REQUEST_METHOD": request.method,
            "PATH_INFO": request.path,
            "QUERY_STRING": request.query,
            "HTTP_ACCEPT": request.headers.get("accept", ""),
            "HTTP_ACCEPT_ENCODING": request.headers.get("accept-encoding", ""),
        }
        status, headers = HTTPStatus.OK, dict[str, str]()

        def start_response(line: str, given: list[tuple[str, str]]) -> None:
            nonlocal status
            status = HTTPStatus(int(line.split()[0]))
            headers.update((name.lower(), value) for name, value in given)

        try:
            body = b"".join(self._app(environ, start_response))
        except Exception as error:
            _log.warning("scrape_failed", kind=type(error).__name__)
            return status_answer(HTTPStatus.INTERNAL_SERVER_ERROR)
        content_type = headers.pop("content-type", "text/plain")
        headers.pop("content-length", None)
        return Answer(status, body, content_type, tuple(headers.items()))
