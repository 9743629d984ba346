"""One way to make a gRPC server: health, reflection, limits, and a port that is ours alone."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Literal

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.addresses import join_address
from baton.cluster_auth import RpcToken
from baton.errors import BatonError, ErrorKind
from services.common.rpc.internal_rpc import TokenCheck

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.common.config.connection_limits import ConnectionLimits

# A prompt of a million tokens in a repeated uint32 is under 4 MB; bulk bytes have their own channel.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

_LIMITS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
# A frozen or cut-off worker breaks its connections within the two together. gRPC's own threads answer pings,
# however busy an event loop is.
PING_EVERY_S = 1.0
PING_ANSWER_S = 1.25

_SERVER_OPTIONS = (
    *_LIMITS,
    # Two servers would share one port without a word.
    ("grpc.so_reuseport", 0),
    # Channels made here ping idle connections every second (see channel_options), which is no abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", int(PING_EVERY_S * 1000) // 4),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client that is frozen or cut off ends its streams within 15 s, not within hours.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
)


def public_options(
    limits: ConnectionLimits, max_connections: int, max_message_bytes: int
) -> list[tuple[str, int]]:
    """Server options of a listener that anybody may connect to; they go before those of every server.

    `max_connections`: what the process has descriptors for. A message above `max_message_bytes` ends its call
    with RESOURCE_EXHAUSTED before it is read.
    """
    handshake_ms, idle_ms = int(limits.head_timeout_s * 1000), int(limits.idle_timeout_s * 1000)
    return [
        ("grpc.max_allowed_incoming_connections", max_connections),
        # From TCP's handshake to the client's HTTP/2 settings.
        ("grpc.server_handshake_timeout_ms", handshake_ms),
        ("grpc.http2.settings_timeout", handshake_ms),
        # A connection without a call gives its descriptor back; clients connect again with their next call.
        ("grpc.max_connection_idle_ms", idle_ms),
        ("grpc.max_concurrent_streams", 1_024),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_metadata_size", limits.max_head_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_head_bytes),
    ]


def channel_options() -> list[tuple[str, int]]:
    """Options of a channel to a server made here: limits, quick reconnects, dead peers noticed."""
    return [
        *_LIMITS,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.keepalive_time_ms", int(PING_EVERY_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(PING_ANSWER_S * 1000)),
        # The one that counts for a frozen peer: without it a lost ping is noticed after a minute.
        ("grpc.http2.ping_timeout_ms", int(PING_ANSWER_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_retries", 0),
        # Channels of one process would share connections, and with them their failures.
        ("grpc.use_local_subchannel_pool", 1),
    ]


class GrpcServer:
    """A grpc.aio server with `grpc.health.v1` and reflection; NOT_SERVING until told otherwise.

    Register servicers on `.server`, then `start`. `service_names` are the full names of those
    services; health knows each of them and the empty name.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        cluster_secret: str = "",
        use: Literal["rpc", "admin"] = "rpc",
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        """`cluster_secret`: calls must carry the token derived from it for this use, or are refused with
        UNAUTHENTICATED; empty: anybody may call. `options` go before those of every server, such as
        `public_options`."""
        checks = [TokenCheck(RpcToken(cluster_secret, use))] if cluster_secret else []
        merged = {**dict(_SERVER_OPTIONS), **dict(options)}
        self.server = grpc.aio.server(options=list(merged.items()), interceptors=checks)
        self._names = (*service_names, "")
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server
        )

    async def start(self, host: str, port: int) -> str:
        """Binds and serves; returns `host:port` with the port really bound.

        Raises BatonError(INVALID) where the address cannot be bound.
        """
        check_port_free(host, port)
        try:
            bound = self.server.add_insecure_port(join_address(host, port))
        except RuntimeError as error:
            raise BatonError(ErrorKind.INVALID, f"cannot listen on {join_address(host, port)}") from error
        await self.set_serving(False)
        await self.server.start()
        return join_address(host, bound)

    async def set_serving(self, serving: bool) -> None:
        """Tells `grpc.health.v1` whether requests would be served."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        state = status.SERVING if serving else status.NOT_SERVING
        for name in self._names:
            await self._health.set(name, state)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones end for `grace_s`, then cancels them."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound TCP socket, not yet listening; BatonError(INVALID) with one clear line otherwise."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Asyncio switches Nagle's algorithm off only where the protocol is named: 40 ms an answer.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        reason = (error.strerror or str(error)).lower()
        message = f"cannot listen on {join_address(host, port)}: {reason}"
        raise BatonError(ErrorKind.INVALID, message) from error
    return bound


def check_port_free(host: str, port: int) -> None:
    """Says in one clear line what gRPC would bury in its own: the port is in use."""
    if port:
        bind_socket(host, port).close()
