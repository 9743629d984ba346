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
)


class ConnectionLimits(StrictModel):
    """Limits of the public listeners. Above a limit the client gets 431, 408 or 503, or is disconnected."""

    max_head_bytes: int = Field(
        16_384,
        ge=1024,
        le=1024 * 1024,
        description="bytes of a request line and headers, or of a gRPC call's metadata",
    )
    max_headers: int = Field(100, ge=8, le=10_000, description="headers of one HTTP request")
    head_timeout_s: float = Field(
        10.0,
        gt=0,
        description="longest time for the headers of a request, or the handshake of a gRPC connection",
    )
    body_timeout_s: float = Field(
        60.0, gt=0, description="longest time from the end of the headers to the end of the body"
    )
    # Must exceed the time for which common clients keep idle connections (httpx 5 s, aiohttp 15 s, load
    # balancers 60 s): a request that is sent while the router closes the connection is lost.
    idle_timeout_s: float = Field(75.0, gt=0, description="an idle connection is closed after so long")
    max_connection_age_s: float = Field(
        3600.0,
        gt=0,
        description="a gRPC connection takes no new calls after so long, so that clients spread over the "
        "routers that there are; its running calls end first",
    )
    write_timeout_s: float = Field(
        60.0,
        gt=0,
        description="longest wait for a client that does not read; a streamed response may wait until "
        "the request's deadline",
    )
    read_grace_s: float = Field(
        5.0, ge=0, description="time after its deadline that a client has to read the rest of its response"
    )
    max_connections: int = Field(
        4096, ge=8, description="open HTTP connections; fewer where the limit of file descriptors is low"
    )
    max_connections_per_address: int | None = Field(
        None,
        ge=1,
        description="open HTTP connections of one client address (IPv6: one /64 network); unset: half of all",
    )
    max_grpc_connections: int = Field(
        1024, ge=8, description="open gRPC connections; fewer where the limit of file descriptors is low"
    )
    max_unread_mb: int = Field(
        256, ge=1, description="memory for output that clients have not read yet, of all requests"
    )
    max_buffered_body_mb: int = Field(
        256, ge=1, description="memory for request bodies that have not arrived in full, of all connections"
    )


class ResponseStorage(StrictModel):
    """Responses that `previous_response_id` continues: input and output of requests, kept in Redis."""

    ttl_s: float | None = Field(
        None,
        ge=1,
        le=31 * 86_400,
        description="seconds for which the responses of /v1/responses are kept in Redis, encrypted, unless a "
        "request says `store: false`; unset: none are kept, and previous_response_id is refused",
    )
    max_kb: int = Field(
        1024,
        ge=1,
        le=16_384,
        description="largest response with the conversation before it; further ones "
        "are refused, or not stored where the output is what is too large",
    )
    max_mb_per_tenant: int = Field(
        64, ge=1, description="memory for one tenant's in Redis; beyond it the oldest are deleted"
    )


class RouterSettings(StrictModel):
    """The operator's settings of the router."""

    host: str = "127.0.0.1"
    http_port: int = Field(8000, ge=0, le=65535, description="0: any free port")
    grpc_port: int = Field(50051, ge=0, le=65535, description="0: any free port")
    public_metrics: bool | None = Field(
        None, description="serve /metrics on http_port as well; unset: only where host is loopback"
    )
    metric_aliases: bool = Field(
        False, description="export metrics under the names of vLLM and OpenTelemetry too"
    )
    admin_host: str = Field("127.0.0.1", description="address of the two admin ports")
    admin_http_host: str | None = Field(
        None, description="address of the admin HTTP port alone; unset: admin_host"
    )
    # AdminService; unset: DEFAULT_GRPC_PORT, or any free port where grpc_port is 0.
    admin_grpc_port: int | None = Field(None, ge=0, le=65535)
    # Metrics and health; unset: DEFAULT_HTTP_PORT, or any free port where grpc_port is 0.
    admin_http_port: int | None = Field(None, ge=0, le=65535)
    processes: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that share the public ports; each uses a core, and gets its share of "
        "max_waiting, max_connections and the memory limits",
    )
    max_waiting: int = Field(1024, ge=1, description="most requests in the queue; more are refused")
    waiting_share: float = Field(
        0.125,
        gt=0,
        le=1,
        description="share of max_waiting that the choices of one request may use; further choices are "
        "queued after them",
    )
    pool: str | None = Field(
        None,
        pattern="^[0-9a-f]{12}$",
        description="id of the pool of workers that serves the model (`baton pool list`); unset: the "
        "first one that is ready",
    )
    queue_timeout_s: float = Field(60.0, gt=0, description="longest time in the queue")
    expected_prefill_tokens_per_s: float = Field(
        10_000.0,
        gt=0,
        description="prompt tokens a second of one prefill worker, for the metrics of demand until one was "
        "measured",
    )
    request_timeout_s: float = Field(600.0, gt=0, description="longest duration of a request")
    prefill_ahead_tokens: int = Field(
        2048,
        ge=1,
        description="queued tokens above which a prefill worker gets no more prompts; one long prompt that "
        "soon ends has the next one sent after it, and two where sequences are decoded, too, a third",
    )
    refuse_late: bool = Field(
        False,
        description="refuse requests at once that, as predicted, cannot meet the limits of latency that "
        "they state",
    )
    max_attempts: int = Field(3, ge=1)
    tokenizer_threads: int = Field(2, ge=1)
    max_body_bytes: int | None = Field(
        None,
        ge=65536,
        description="largest HTTP body or gRPC message; unset: 1 MiB + 16 bytes for each token of context",
    )
    max_answer_values: int = Field(
        1_048_576,
        ge=1,
        description="most numbers in one response: outputs x tokens x (1, or 2 + top logprobs where "
        "asked for)",
    )
    strict_fields: bool = Field(
        False,
        description="refuse requests with fields that no API documents; else such fields are ignored and "
        "named in the response",
    )
    tool_calls: ToolCallFormat = Field(
        "auto",
        description="how the model writes tool calls; auto: as its chat template shows; none: tools are "
        "refused",
    )
    reasoning: ReasoningFormat = Field(
        "auto",
        description="how the model marks reasoning, which is returned apart from the content; think: "
        "<think>…</think>; auto: as its chat template shows",
    )
    ui: bool = Field(
        True,
        description="web page at / of the admin HTTP port; where other machines reach that port, only "
        "with API keys, and not with require_tls",
    )
    stored_responses: ResponseStorage = ResponseStorage()
    audit_log: Path | None = Field(
        None,
        description="file of the audit log: who did what, without content; with several processes, a file "
        "for each, with its number at the end; unset: none",
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="names that HTTP requests may have in Host, `.example.com` for a domain, `*` for "
        "any; unset: loopback names where the listener is on loopback, else any",
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
