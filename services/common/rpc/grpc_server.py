"""gRPC servers with health, reflection, limits and an exclusive port; the options of channels to them."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Literal

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.base.addresses import accept_both_families, join_address, listening_family, listening_host
from baton.base.cluster_auth import RpcToken
from baton.base.errors import BatonError, ErrorKind
from baton.rpc.connection_options import (
    EXCLUSIVE_PORT,
    PING_INTERVAL_S,
    keepalive,
    member_options,
    message_limits,
)
from services.common.rpc.call_check import CallCheck

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from baton.tls.server import ServerTls
    from services.common.config.router import ConnectionLimits

# A prompt of a million tokens in a repeated uint32 is under 4 MB; KV blocks go over links of their own.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

# What of a stream may be on its way without being read. Tokens that a busy router does not take wait at their
# worker, which sends them together, and not in buffers, where each step is a message of its own. A longer
# message is sent in parts while it is read.
UNREAD_BYTES = 16 * 1024

_MAX_PENDING_CALLS = 8_192

_SERVER_OPTIONS = (
    *message_limits(MAX_MESSAGE_BYTES),
    EXCLUSIVE_PORT,
    # The channels of `channel_options` ping idle connections every second, which must not count as abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", int(PING_INTERVAL_S * 1000) // 4),
    # The streams of a frozen or unreachable client end within 15 s, not within hours.
    *keepalive(10.0, 5.0),
)


def public_options(
    limits: ConnectionLimits, max_connections: int, max_message_bytes: int
) -> list[tuple[str, int]]:
    """Server options of a public listener; they take precedence over the defaults.

    `max_connections`: as many as the process has descriptors for. A message above `max_message_bytes` ends
    its call with RESOURCE_EXHAUSTED before it is read.
    """
    handshake_ms, idle_ms = int(limits.head_timeout_s * 1000), int(limits.idle_timeout_s * 1000)
    age_ms = int(limits.max_connection_age_s * 1000)
    return [
        ("grpc.max_allowed_incoming_connections", max_connections),
        # From TCP's handshake to the client's HTTP/2 settings.
        ("grpc.server_handshake_timeout_ms", handshake_ms),
        ("grpc.http2.settings_timeout", handshake_ms),
        # Closes connections without a call; clients reconnect with their next call.
        ("grpc.max_connection_idle_ms", idle_ms),
        # Gives notice of the end (GOAWAY): new calls go to a new connection, running ones end on this one.
        ("grpc.max_connection_age_ms", age_ms),
        ("grpc.max_concurrent_streams", 1_024),
        # Calls that the event loop has not taken yet. By default gRPC refuses them from 1,000 on, before the
        # router can queue them or say when to come back.
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_metadata_size", limits.max_head_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_head_bytes),
    ]


def channel_options() -> list[tuple[str, int]]:
    """Options of a channel to a `GrpcServer`: limits, quick reconnects, dead peers found, short buffers."""
    return [
        *member_options(MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_retries", 0),
        # By default gRPC lets a stream have megabytes on their way.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
    ]


class GrpcServer:
    """A grpc.aio server with `grpc.health.v1` and reflection; NOT_SERVING until `set_serving`.

    Register servicers on `.server`, then `start`. `service_names` are the full names of those
    services; health knows each of them and the empty name.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        cluster_secret: str = "",
        use: Literal["rpc", "admin"] = "rpc",
        options: Sequence[tuple[str, int]] = (),
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
        tls: ServerTls | None = None,
        *,
        shares_port: bool = False,
    ) -> None:
        """`cluster_secret`: calls must carry the token derived from it for this use, or are refused with
        UNAUTHENTICATED; empty: no authentication. `options`, such as `public_options`, take precedence over
        the defaults. `interceptors` run after that authentication. `tls`: None: plaintext. `shares_port`:
        other processes listen on the same port (SO_REUSEPORT); the kernel spreads connections over them."""
        self._shared = shares_port
        self._tls = tls
        token = RpcToken(cluster_secret, use) if cluster_secret else None
        peers = tls if tls is not None and tls.checks_peers else None
        if token is not None or peers is not None:
            interceptors = [CallCheck(token, peers), *interceptors]
        merged = {
            **dict(_SERVER_OPTIONS),
            **dict(options),
            **({"grpc.so_reuseport": 1} if shares_port else {}),
        }
        self.server = grpc.aio.server(options=list(merged.items()), interceptors=interceptors)
        self._names = (*service_names, "")
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server
        )

    async def start(self, host: str, port: int) -> str:
        """Binds and serves; returns `host:port` with the bound port.

        Raises BatonError(INVALID) where the address cannot be bound.
        """
        if not self._shared:
            check_port_free(host, port)
        try:
            bound = self._bind(join_address(listening_host(host), port))
        except RuntimeError as error:
            raise BatonError(ErrorKind.INVALID, f"cannot listen on {join_address(host, port)}") from error
        await self.set_serving(False)
        await self.server.start()
        return join_address(host, bound)

    def _bind(self, address: str) -> int:
        if self._tls is None:
            return self.server.add_insecure_port(address)
        return self.server.add_secure_port(address, self._tls.credentials())

    async def set_serving(self, serving: bool) -> None:
        """Sets the status in `grpc.health.v1`."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        state = status.SERVING if serving else status.NOT_SERVING
        for name in self._names:
            await self._health.set(name, state)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones end for `grace_s`, then cancels them."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def bind_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound TCP socket that does not listen yet; `shared`: others may bind the port too (SO_REUSEPORT).
    `::`: all addresses of both families, or of IPv4 where the machine has no other.
    Raises BatonError(INVALID) where it cannot be bound."""
    host = listening_host(host)
    family = listening_family(host)
    # Asyncio disables Nagle's algorithm only where the protocol is stated: 40 ms for each answer.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    accept_both_families(bound)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        reason = (error.strerror or str(error)).lower()
        message = f"cannot listen on {join_address(host, port)}: {reason}"
        raise BatonError(ErrorKind.INVALID, message) from error
    return bound


def check_port_free(host: str, port: int) -> None:
    """Raises BatonError(INVALID) where the port is in use; gRPC's own error does not state the reason."""
    if port:
        bind_socket(host, port).close()
