"""Configuration of the router's processes."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt

from baton.base.addresses import is_loopback
from baton.base.admin_address import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from baton.base.errors import BatonError, ErrorKind
from services.common.config.state import StateConfig
from services.common.config.tls import Auth, InternalTls, PublicTls
from services.common.config.tracing import TracingSettings
from services.common.config.types import (
    DRAIN_S,
    ClusterSecret,
    LogLevel,
    Port,
    ReasoningFormat,
    StrictModel,
    ToolCallFormat,
    fixed,
    setting,
)


class ConnectionLimits(StrictModel):
    """Limits of the public listeners. Above a limit the client gets 431, 408 or 503, or is disconnected."""

    max_head_bytes: int = fixed(16_384, "it is 16384 bytes: headers carry a key and ids, no content")
    max_headers: int = fixed(100, "it is 100: headers carry a key and ids, no content")
    head_timeout_s: float = fixed(10.0, "it is 10 s: a connection without headers takes the place of others")
    body_timeout_s: float = fixed(60.0, "it is 60 s, in which a client with 1 Mbit/s sends 7 MB")
    # Must exceed the time for which common clients keep idle connections (httpx 5 s, aiohttp 15 s, load
    # balancers 60 s): a request that is sent while the router closes the connection is lost.
    idle_timeout_s: PositiveFloat = setting(
        75.0,
        "time after which an idle connection is closed; set it longer than that of a load balancer in front",
    )
    max_connection_age_s: PositiveFloat = setting(
        3600.0,
        "time after which a gRPC connection takes no new calls, so that clients spread over new routers; "
        "running calls end first, and clients connect again by themselves",
    )
    write_timeout_s: float = fixed(60.0, "it is 60 s; a stream may wait until its request's deadline")
    read_grace_s: float = fixed(
        5.0, "it is 5 s after the request's deadline, enough to read what is buffered"
    )
    max_connections: int = setting(
        4096,
        "open HTTP connections, see [below](#connections-at-the-limit); over gRPC a quarter as many, and "
        "further ones are closed at once",
        ge=8,
    )
    max_connections_per_address: PositiveInt | None = setting(
        None,
        "open HTTP connections of one address (IPv6: of a /64 network); unset: half of all; behind a proxy "
        "set it to `max_connections`",
        unit="connections",
    )
    max_grpc_connections: int | None = fixed(
        None, "it is a quarter of max_connections; further ones are closed at once", ge=8
    )
    max_unread_mb: PositiveInt = fixed(
        256, "it is 256 MiB for output that no client has read; beyond it the request with the most fails"
    )
    max_buffered_body_mb: int = fixed(
        256, "it is 256 MiB; beyond it the connection with the most of one gets 503"
    )

    @property
    def grpc_connections(self) -> int:
        """Open gRPC connections; further ones are closed at once."""
        return self.max_grpc_connections or max(8, self.max_connections // 4)


class ResponseStorage(StrictModel):
    """Responses that `previous_response_id` continues: input and output of requests, kept in Redis."""

    ttl_s: float | None = setting(
        None,
        "time for which `/v1/responses` keeps responses in Redis, encrypted, unless a request says `store: "
        "false`; unset: none are kept, and `previous_response_id` is refused",
        ge=1,
        le=31 * 86400,
    )
    max_kb: int | None = fixed(
        None,
        "it is as much as a body may have, 1 MiB plus 16 bytes for each token of the context, within "
        "max_mb_per_tenant",
        ge=1,
    )
    max_mb_per_tenant: PositiveInt = setting(
        64,
        "memory in Redis for responses of one tenant, or without tenants of all; the oldest are deleted",
        unit="MiB",
    )

    def most_bytes(self, max_body_bytes: int) -> int:
        """The largest response that is stored, together with the conversation before it, where bodies have at
        most `max_body_bytes`; 0: none are."""
        most = max_body_bytes if self.max_kb is None else self.max_kb << 10
        return 0 if self.ttl_s is None else min(most, self.max_mb_per_tenant << 20)


class RouterSettings(StrictModel):
    """The operator's settings of the router."""

    host: str = setting(
        "127.0.0.1",
        "address on which clients reach the router; `0.0.0.0` or `::`: every one of this machine, which "
        "needs API keys or `auth: none`",
        who="everyone",
    )
    http_port: Port = setting(8000, "port of the HTTP API; 0: any free port", who="everyone", flag=True)
    grpc_port: Port = setting(50051, "port of the gRPC API; 0: any free port", flag=True)
    public_metrics: bool | None = setting(
        None,
        "serve `/metrics` on the public HTTP port too; unset: only where `router.host` is loopback",
        flag=True,
    )
    metric_aliases: bool = setting(
        False, "export metrics under the [names of vLLM and OpenTelemetry](metrics.md#other-names) too"
    )
    admin_host: str = setting(
        "127.0.0.1",
        "address of the ports for operators; beyond loopback it needs a cluster secret",
        flag=True,
    )
    admin_http_host: str | None = setting(
        None,
        "address of the HTTP port for operators alone, for probes and Prometheus; unset: `router.admin_host`",
        flag=True,
    )
    admin_grpc_port: Port | None = setting(
        None,
        f"port of AdminService, which `baton status` and `baton drain` call; unset: {DEFAULT_GRPC_PORT}, "
        "or any free port where `router.grpc_port` is 0",
        flag=True,
    )
    admin_http_port: Port | None = setting(
        None,
        f"port of `/metrics`, `/health`, `/ready` and the web page; unset: {DEFAULT_HTTP_PORT}, or any free "
        "port where `router.grpc_port` is 0",
        flag=True,
    )
    processes: int = setting(
        1,
        "router processes that share ports and limits, each with a core: [several "
        "processes](operations.md#several-router-processes)",
        flag="router_processes",
        ge=1,
        le=64,
    )
    max_waiting: PositiveInt = setting(
        1024,
        "requests that may wait in the queue, each output counted; further ones get 503 `overloaded`",
        unit="requests",
    )
    waiting_share: float = fixed(0.125, "it is an eighth of max_waiting, so that no request fills the queue")
    pool: str | None = setting(
        None,
        "id of the [pool](operations.md#pools) that serves the model, see `baton pool list`; unset: the "
        "first that is ready",
        pattern="^[0-9a-f]{12}$",
    )
    queue_timeout_s: PositiveFloat = setting(60.0, "longest time that a request waits in the queue")
    expected_prefill_tokens_per_s: float = fixed(10_000.0, "it is 10000, until the first prompt was measured")
    request_timeout_s: PositiveFloat = setting(
        600.0, "longest duration of a request; one that reaches it ends with the error `deadline`"
    )
    prefill_ahead_tokens: int = fixed(
        2048, "it is 2048 tokens, the most that a prefill step holds by default"
    )
    refuse_late: bool = setting(
        False,
        "refuse requests at once that, as predicted, cannot meet the [latencies they "
        "state](api.md#service-level-objectives)",
        flag=True,
    )
    max_attempts: int = fixed(3, "it is 3: what failed at three workers would most likely fail at a fourth")
    tokenizer_threads: int = fixed(2, "it is 2; for more cores there is router.processes")
    max_body_bytes: int | None = fixed(None, "it is 1 MiB plus 16 bytes for each token of the context")
    max_answer_values: int = fixed(
        1_048_576,
        "it is 1048576 numbers in one response (outputs x tokens x (1, or 2 + logprobs)), which bounds the "
        "router's memory for a response that is not streamed",
    )
    strict_fields: bool = setting(
        False,
        "refuse requests with [undocumented fields](fields.md); else they are ignored and named",
        flag=True,
    )
    tool_calls: ToolCallFormat = setting(
        "auto",
        "how the model writes [tool calls](api.md#tool-calls); auto: as its chat template shows; none: "
        "refused",
        flag=True,
    )
    reasoning: ReasoningFormat = setting(
        "auto",
        "how the model marks [reasoning](api.md#reasoning), which is returned apart; auto: as its chat "
        "template shows; none: it stays in the content",
        flag=True,
    )
    ui: bool = setting(
        True,
        "serve a [web page](operations.md#the-web-page) at `/` of the HTTP port for operators; where others "
        "reach it, only with API keys, and not with `require_tls`",
        flag=True,
    )
    stored_responses: ResponseStorage = ResponseStorage()
    audit_log: Path | None = setting(
        None, "file of the [audit log](#the-audit-log): who did what, without content; unset: none", flag=True
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "names that HTTP requests may carry in `Host`, `.example.com` for a domain, `*` for any; unset: "
        "those of loopback where `router.host` is loopback, else any",
    )
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
    def bound_admin_http_host(self) -> str:
        """The address of the admin HTTP port."""
        return self.admin_host if self.admin_http_host is None else self.admin_http_host

    @property
    def serves_public_metrics(self) -> bool:
        """True if /metrics is on the public HTTP port too."""
        return is_loopback(self.host) if self.public_metrics is None else self.public_metrics


class GroupMember(StrictModel):
    """Index of a process among several router processes, and the folder of their sockets."""

    index: int = Field(ge=0)
    count: int = Field(ge=2)
    folder: str
    serves_admin: bool = Field(False, description="whether it serves the admin ports from its start")


class RouterConfig(RouterSettings):
    """Configuration of a router process."""

    # Folder with tokenizer.json and the model's configuration.
    model: str
    served_model_name: str
    byte_tokenizer: bool = Field(False, description="each byte is a token; no tokenizer.json")
    workers: tuple[str, ...] = Field((), description="host:port of the workers' gRPC fronts at the start")
    state: StateConfig | None = Field(None, description="unset: neither registry nor journal")
    prefix_secret: str = Field("", repr=False, description="the workers'; unset: no placement by prefix")
    cluster_secret: str = ClusterSecret
    tls: InternalTls | None = Field(None, description="unset: plaintext to the workers")
    public_tls: PublicTls | None = Field(None, description="unset: plaintext on the public ports")
    auth: Auth | None = Field(
        None, description="unset: the public ports need no API key, and must be on loopback"
    )
    require_tls: bool = Field(False, description="refuse to start where a port would be plaintext")
    tracing: TracingSettings = TracingSettings()
    member: GroupMember | None = Field(None, description="set by the process that starts several")
    drain_s: float = Field(DRAIN_S, ge=0)
    log_level: LogLevel = "info"

    @property
    def serves_ui(self) -> bool:
        """True if the web page is served. It runs prompts, and its port is plaintext: other machines may
        reach it only where it needs a key, and TLS is not required."""
        if is_loopback(self.bound_admin_http_host):
            return self.ui
        return self.ui and self.auth is not None and not self.auth.none and not self.require_tls


def check_public_access(host: str, auth: Auth | None) -> None:
    """Raises BatonError(INVALID) where other machines reach the public ports on `host` and `auth` does not
    state whether they need an API key."""
    if auth is None and not is_loopback(host):
        raise BatonError(
            ErrorKind.INVALID,
            f"the public ports on {host} are reached by other machines and have no API keys: set "
            "auth.api_keys_file, auth.tenants_file or auth.redis_keys, or auth: none to serve everyone",
        )
