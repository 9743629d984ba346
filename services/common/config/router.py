"""Configuration of the router."""

from __future__ import annotations

from pydantic import Field

from baton.addresses import is_loopback
from baton.admin_address import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from services.common.config.state import StateConfig
from services.common.config.types import DRAIN_S, ClusterSecret, LogLevel, StrictModel


class ConnectionLimits(StrictModel):
    """Limits of the public listeners. Above a limit the client gets 431, 408 or 503, or is disconnected."""

    # Bytes of a request line and headers, or of a gRPC call's metadata.
    max_head_bytes: int = Field(16_384, ge=1024, le=1024 * 1024)
    # Headers of one HTTP request.
    max_headers: int = Field(100, ge=8, le=10_000)
    # Longest time for the headers of a request, or the handshake of a gRPC connection.
    head_timeout_s: float = Field(10.0, gt=0)
    # Longest time from the end of the headers to the end of the body.
    body_timeout_s: float = Field(60.0, gt=0)
    # An idle connection is closed after so long. Must exceed the time for which common clients keep idle
    # connections (httpx 5 s, aiohttp 15 s, load balancers 60 s): a request that is sent while the router
    # closes the connection is lost.
    idle_timeout_s: float = Field(75.0, gt=0)
    # Longest wait for a client that does not read; a streamed response may wait until the request's deadline.
    write_timeout_s: float = Field(60.0, gt=0)
    # Time after its deadline that a client has to read the rest of its response.
    read_grace_s: float = Field(5.0, ge=0)
    # Open HTTP connections; fewer where the limit of file descriptors is low.
    max_connections: int = Field(4096, ge=8)
    # Open HTTP connections of one client address (IPv6: one /64 network); unset: half of all.
    max_connections_per_address: int | None = Field(None, ge=1)
    # Open gRPC connections; fewer where the limit of file descriptors is low.
    max_grpc_connections: int = Field(1024, ge=8)
    # Memory for output that clients have not read yet, of all requests.
    max_unread_mb: int = Field(256, ge=1)
    # Memory for request bodies that have not arrived in full, of all connections.
    max_buffered_body_mb: int = Field(256, ge=1)


class RouterSettings(StrictModel):
    """The operator's settings of the router."""

    host: str = "127.0.0.1"
    # 0: any free port.
    http_port: int = Field(8000, ge=0, le=65535)
    # 0: any free port.
    grpc_port: int = Field(50051, ge=0, le=65535)
    # Serve /metrics on http_port as well; unset: only where host is loopback.
    public_metrics: bool | None = None
    # Address of the two admin ports.
    admin_host: str = "127.0.0.1"
    # AdminService; unset: DEFAULT_GRPC_PORT, or any free port where grpc_port is 0.
    admin_grpc_port: int | None = Field(None, ge=0, le=65535)
    # Metrics and health; unset: DEFAULT_HTTP_PORT, or any free port where grpc_port is 0.
    admin_http_port: int | None = Field(None, ge=0, le=65535)
    # Most requests in the queue; more are refused.
    max_waiting: int = Field(1024, ge=1)
    # Share of max_waiting that the choices of one request may use; further choices are queued after them.
    waiting_share: float = Field(0.125, gt=0, le=1)
    # Id of the pool of workers that serves the model (`baton pool list`); unset: the first one that is ready.
    pool: str | None = Field(None, pattern="^[0-9a-f]{12}$")
    # Longest time in the queue.
    queue_timeout_s: float = Field(60.0, gt=0)
    # Longest duration of a request.
    request_timeout_s: float = Field(600.0, gt=0)
    # Queued tokens above which a prefill worker gets no more prompts.
    prefill_ahead_tokens: int = Field(2048, ge=1)
    max_attempts: int = Field(3, ge=1)
    tokenizer_threads: int = Field(2, ge=1)
    # Largest HTTP body or gRPC message; unset: 1 MiB + 16 bytes for each token of context.
    max_body_bytes: int | None = Field(None, ge=65536)
    # Most numbers in one response: outputs x tokens x (1, or 2 + top logprobs where asked for).
    max_answer_values: int = Field(1_048_576, ge=1)
    # Names that HTTP requests may have in Host, `.example.com` for a domain, `*` for any; unset: loopback
    # names where the listener is on loopback, else any.
    allowed_hosts: tuple[str, ...] = ()
    connections: ConnectionLimits = ConnectionLimits()

    @property
    def admin_ports(self) -> tuple[int, int]:
        """The ports of AdminService and of admin HTTP to bind; 0: any free port."""
        # With grpc_port 0 several clusters may share a host, and fixed defaults would collide.
        grpc, http = (DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT) if self.grpc_port else (0, 0)
        return (
            grpc if self.admin_grpc_port is None else self.admin_grpc_port,
            http if self.admin_http_port is None else self.admin_http_port,
        )

    @property
    def serves_public_metrics(self) -> bool:
        """Whether /metrics is on the public HTTP port too."""
        return is_loopback(self.host) if self.public_metrics is None else self.public_metrics


class RouterConfig(RouterSettings):
    """Configuration of a router process."""

    # Folder with tokenizer.json and the model's configuration.
    model: str
    served_model_name: str
    # Each byte is a token; no tokenizer.json.
    byte_tokenizer: bool = False
    # host:port of the workers' gRPC fronts at the start.
    workers: tuple[str, ...] = ()
    # Unset: neither registry nor journal.
    state: StateConfig | None = None
    # The workers'; unset: no placement by prefix.
    prefix_secret: str = Field("", repr=False)
    cluster_secret: str = ClusterSecret
    drain_s: float = Field(DRAIN_S, ge=0)
    log_level: LogLevel = "info"
