"""Configuration of the router."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

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
    ReasoningFormat,
    StrictModel,
    ToolCallFormat,
    fixed,
    setting,
)


class ConnectionLimits(StrictModel):
    """Limits of the public listeners. Above a limit the client gets 431, 408 or 503, or is disconnected."""

    max_head_bytes: int = fixed(
        16_384,
        "it is 16384 bytes: headers carry a key and ids, no content",
        ge=1024,
        le=1024 * 1024,
    )
    max_headers: int = fixed(
        100,
        "it is 100: headers carry a key and ids, no content",
        ge=8,
        le=10_000,
    )
    head_timeout_s: float = fixed(
        10.0,
        "it is 10 s for the headers, or for the TLS handshake; a connection without them takes the place of "
        "others",
        gt=0,
    )
    body_timeout_s: float = fixed(
        60.0,
        "it is 60 s from the end of the headers, in which a client with 1 Mbit/s sends 7 MB",
        gt=0,
    )
    # Must exceed the time for which common clients keep idle connections (httpx 5 s, aiohttp 15 s, load
    # balancers 60 s): a request that is sent while the router closes the connection is lost.
    idle_timeout_s: float = setting(
        75.0,
        "time after which an idle connection is closed, over HTTP and gRPC; longer than the idle timeout of "
        "a load balancer before it",
        gt=0,
    )
    max_connection_age_s: float = setting(
        3600.0,
        "time after which a gRPC connection takes no new calls, so that clients spread over new routers; "
        "its running calls end first, and clients connect again by themselves",
        gt=0,
    )
    write_timeout_s: float = fixed(
        60.0, "it is 60 s; a streamed response may wait for its reader until the request's deadline", gt=0
    )
    read_grace_s: float = fixed(
        5.0, "it is 5 s after the request's deadline, enough to read what is buffered", ge=0
    )
    max_connections: int = setting(
        4096,
        "open HTTP connections, see [below](#connections-at-the-limit)",
        unit="connections",
        ge=8,
    )
    max_connections_per_address: int | None = setting(
        None,
        "open HTTP connections of one client address (IPv6: of one /64 network); unset: half of "
        "`max_connections`; behind a proxy set it to all of them",
        unit="connections",
        ge=1,
    )
    max_grpc_connections: int = setting(
        1024, "open gRPC connections; further ones are closed at once", unit="connections", ge=8
    )
    max_unread_mb: int = setting(
        256,
        "memory for output that clients have not read yet; at the limit the request with the most of it "
        "fails",
        ge=1,
    )
    max_buffered_body_mb: int = fixed(
        256,
        "it is 256 MiB for request bodies that have not arrived in full, of which one has at most "
        "max_body_bytes; beyond it the connection with the most of one gets 503",
        ge=1,
    )


class ResponseStorage(StrictModel):
    """Responses that `previous_response_id` continues: input and output of requests, kept in Redis."""

    ttl_s: float | None = setting(
        None,
        "time for which responses of `/v1/responses` are kept in Redis, encrypted, unless a request says "
        "`store: false`; unset: none are kept, and `previous_response_id` is refused",
        ge=1,
        le=31 * 86_400,
    )
    max_kb: int = setting(
        1024,
        "largest response together with the conversation before it; a larger one is not stored",
        ge=1,
        le=16_384,
    )
    max_mb_per_tenant: int = setting(
        64,
        "memory in Redis for the responses of one tenant (without tenants: of all); beyond it the oldest "
        "are deleted",
        unit="MiB",
        ge=1,
    )


class RouterSettings(StrictModel):
    """The operator's settings of the router."""

    host: str = setting(
        "127.0.0.1",
        "address on which clients reach the router; `0.0.0.0` or `::`: every address of this machine, which "
        "needs API keys or `auth: none`",
        who="everyone",
    )
    http_port: int = setting(
        8000, "port of the HTTP API; 0: any free port", who="everyone", flag=True, ge=0, le=65535
    )
    grpc_port: int = setting(50051, "port of the gRPC API; 0: any free port", flag=True, ge=0, le=65535)
    public_metrics: bool | None = setting(
        None,
        "serve `/metrics` on the public HTTP port too; unset: only where `router.host` is loopback",
        flag=True,
    )
    metric_aliases: bool = setting(
        False,
        "export metrics under the [names of vLLM and OpenTelemetry](metrics.md#other-names) too, for "
        "dashboards that expect them",
    )
    admin_host: str = setting(
        "127.0.0.1",
        "address of the ports for operators; beyond loopback it needs a cluster secret",
        flag=True,
    )
    admin_http_host: str | None = setting(
        None,
        "address of the HTTP port for operators alone, which probes and Prometheus reach; unset: as "
        "`router.admin_host`",
        flag=True,
    )
    admin_grpc_port: int | None = setting(
        None,
        f"port of AdminService, which `baton status` and `baton drain` call; unset: {DEFAULT_GRPC_PORT}, "
        "or any free port where `router.grpc_port` is 0",
        flag=True,
        ge=0,
        le=65535,
    )
    admin_http_port: int | None = setting(
        None,
        f"port of `/metrics`, `/health`, `/ready` and the web page; unset: {DEFAULT_HTTP_PORT}, or any free "
        "port where `router.grpc_port` is 0",
        flag=True,
        ge=0,
        le=65535,
    )
    processes: int = setting(
        1,
        "router processes that share the public ports, each of which uses a core and has its share of the "
        "router's limits: [several processes](operations.md#several-router-processes)",
        unit="processes",
        flag="router_processes",
        ge=1,
        le=64,
    )
    max_waiting: int = setting(
        1024,
        "requests that may wait in the queue, each output of a request counted; further ones get 429",
        unit="requests",
        ge=1,
    )
    waiting_share: float = fixed(
        0.125,
        "it is an eighth of max_waiting for the outputs of one request, so that no single request fills the "
        "queue; further outputs are queued after them",
        gt=0,
        le=1,
    )
    pool: str | None = setting(
        None,
        "id of the [pool](operations.md#pools) of workers that serves the model, as `baton pool list` shows "
        "it; unset: the first one that is ready",
        pattern="^[0-9a-f]{12}$",
    )
    queue_timeout_s: float = setting(60.0, "longest time that a request waits in the queue", gt=0)
    expected_prefill_tokens_per_s: float = fixed(
        10_000.0,
        "it is 10000 tokens a second, which counts only until the first prompt was measured, seconds after "
        "the start",
        gt=0,
    )
    request_timeout_s: float = setting(
        600.0, "longest duration of a request; then it ends with what was generated", gt=0
    )
    prefill_ahead_tokens: int = fixed(
        2048,
        "it is 2048 tokens, the most that a prefill step holds by default: fewer would let workers idle "
        "between prompts, and with more a prompt waits at one worker while another is free",
        ge=1,
    )
    refuse_late: bool = setting(
        False,
        "refuse requests at once that, as predicted, cannot meet the [latencies they "
        "state](api.md#service-level-objectives)",
        flag=True,
    )
    max_attempts: int = fixed(
        3, "it is 3: what failed at three workers would most likely fail at a fourth", ge=1
    )
    tokenizer_threads: int = fixed(
        2,
        "it is 2: requests above 64 KiB have a process of their own, and for more cores there is "
        "router.processes",
        ge=1,
    )
    max_body_bytes: int | None = fixed(
        None,
        "it is 1 MiB and 16 bytes for each token of the model's context: less would refuse prompts that "
        "fit, and more could not be served",
        ge=65536,
    )
    max_answer_values: int = fixed(
        1_048_576,
        "it is 1048576 numbers in one response (outputs x tokens x (1, or 2 + logprobs)), which bounds the "
        "router's memory for a response that is not streamed",
        ge=1,
    )
    strict_fields: bool = setting(
        False,
        "refuse requests with [undocumented fields](fields.md); else those are ignored and named in the "
        "response",
        flag=True,
    )
    tool_calls: ToolCallFormat = setting(
        "auto",
        "how the model writes [tool calls](api.md#tool-calls); auto: as its chat template shows; none: "
        "tools are refused",
        flag=True,
    )
    reasoning: ReasoningFormat = setting(
        "auto",
        "how the model marks its [reasoning](api.md#reasoning), which is returned apart from the content; "
        "auto: as its chat template shows; none: it stays in the content",
        flag=True,
    )
    ui: bool = setting(
        True,
        "serve a [web page](operations.md#the-web-page) at `/` of the HTTP port for operators; where other "
        "machines reach that port, only with API keys, and not with `require_tls`",
        flag=True,
    )
    stored_responses: ResponseStorage = ResponseStorage()
    audit_log: Path | None = setting(
        None,
        "file of the [audit log](#the-audit-log), which says who did what, without content; unset: none",
        flag=True,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "names that HTTP requests may carry in `Host`, `.example.com` for a domain, `*` for any; unset: "
        "names of loopback where `router.host` is loopback, else any",
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
        """Whether /metrics is on the public HTTP port too."""
        return is_loopback(self.host) if self.public_metrics is None else self.public_metrics


class GroupMember(StrictModel):
    """Which of several router processes this is, and the folder of their sockets."""

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
        """Whether the web page is served. It runs prompts, and its port is plaintext: other machines may
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
