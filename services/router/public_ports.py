"""The public listeners: RouterService over gRPC, and the API and probes over HTTP, both behind the keys of
tenants where there are some."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.applications import Starlette

from baton.v1.router_pb2 import DESCRIPTOR
from services.common.config.router import RouterConfig
from services.common.rpc.grpc_server import GrpcServer, public_options
from services.router.api.grpc_api import SERVICE_NAME
from services.router.api.grpc_calls import GrpcCalls
from services.router.auth.grpc_auth import GrpcAuth
from services.router.auth.http_auth import require_keys
from services.router.auth.keys import Keys
from services.router.auth.scopes import HTTP_RULES, check_grpc_rules, http_rule
from services.router.http.connections import Connections
from services.router.http.descriptors import within_descriptors
from services.router.http.server import HttpServer
from services.router.request.call_trace import CallTrace


class PublicPorts:
    """The servers of both public ports, which several router processes may share. RouterService is to be
    registered at `grpc` before the start."""

    def __init__(
        self,
        config: RouterConfig,
        app: Starlette,
        keys: Keys | None,
        trace_of: Callable[[Mapping[str, str]], CallTrace | None],
        max_message_bytes: int,
    ) -> None:
        """`app`: served over HTTP. BatonError(INVALID) if a certificate is unusable; a route or method
        without a rule of access is an error."""
        self._config = config
        self._shared = config.member is not None
        limits = within_descriptors(config.connections)
        self.connections = Connections(limits)
        files = tls = None
        if config.public_tls is not None:
            # `cryptography` takes 50 ms to import.
            from services.common.rpc.public_tls import public_grpc_tls, public_tls_files

            files = public_tls_files(config.public_tls)
            tls = public_grpc_tls(config.public_tls, files)
        self.grpc = GrpcServer(
            [SERVICE_NAME],
            options=public_options(limits, limits.grpc_connections, max_message_bytes),
            interceptors=[GrpcCalls(trace_of), *([GrpcAuth(keys)] if keys else [])],
            tls=tls,
            shares_port=self._shared,
        )
        check_grpc_rules([DESCRIPTOR.services_by_name["RouterService"]])
        for route in app.routes:
            http_rule(route)  # without keys too: a route without a rule does not start
        if keys:
            require_keys(app, keys, HTTP_RULES)
        self.http = HttpServer(app, self.connections, config.allowed_hosts, files, trace_of)

    def bind_http(self) -> str:
        """Binds the HTTP port, which serves once `http` is started, and returns its host:port.
        BatonError(INVALID) if it is in use."""
        return self.http.bind(self._config.host, self._config.http_port, shared=self._shared)

    async def start_grpc(self) -> str:
        """Starts to serve gRPC and returns its host:port. BatonError(INVALID) if the port is in use."""
        return await self.grpc.start(self._config.host, self._config.grpc_port)
