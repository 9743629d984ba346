"""The admin listeners: AdminService, and over HTTP metrics, probes and the web page. One of several router
processes has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.applications import Starlette

from services.common.config.router import RouterConfig
from services.common.rpc.grpc_server import GrpcServer, public_options
from services.router.api.admin_api import ADMIN_SERVICE_NAME, AdminService
from services.router.auth.configured import admin_secret
from services.router.http.connections import Connections
from services.router.http.descriptors import ADMIN_LIMITS
from services.router.http.server import HttpServer
from services.router.request.call_trace import CallTrace

# The largest request of AdminService names a worker or a pool.
_MESSAGE_BYTES = 64 * 1024


class AdminPorts:
    """Bound and served by `start`, which may come long after the construction."""

    def __init__(
        self,
        config: RouterConfig,
        service: AdminService,
        app: Starlette,
        trace_of: Callable[[Mapping[str, str]], CallTrace | None],
        addresses: dict[str, str],
    ) -> None:
        """`addresses`: gets `admin` and `admin_http`, each `host:port`. BatonError(INVALID) if other
        machines can reach AdminService without a secret."""
        self._config = config
        self._addresses = addresses
        options = public_options(ADMIN_LIMITS, ADMIN_LIMITS.grpc_connections, _MESSAGE_BYTES)
        self.grpc = GrpcServer([ADMIN_SERVICE_NAME], admin_secret(config), "admin", options)
        service.register(self.grpc.server)
        self.http = HttpServer(app, Connections(ADMIN_LIMITS), config.allowed_hosts, trace_of=trace_of)

    @property
    def started(self) -> bool:
        """True if `start` has been called."""
        return "admin" in self._addresses

    def bind_http(self) -> None:
        """Binds the HTTP port. BatonError(INVALID) if it is in use."""
        host, port = self._config.bound_admin_http_host, self._config.admin_ports[1]
        self._addresses["admin_http"] = self.http.bind(host, port)

    async def start(self) -> None:
        """Starts to serve; binds what is not bound yet. BatonError(INVALID) if a port is in use."""
        if "admin_http" not in self._addresses:
            self.bind_http()
        port = self._config.admin_ports[0]
        self._addresses["admin"] = await self.grpc.start(self._config.admin_host, port)
        # As long as it answers; readiness is the public port's.
        await self.grpc.set_serving(True)
        await self.http.start()
