"""Parses a Redis URL and creates a client with deadlines.

    redis://[user:password@]host[:port][/db]                      one server
    redis+sentinel://[user:password@]host[:port],.../service[/db] the master of a Sentinel service
    redis+cluster://[user:password@]host[:port],...               a Redis Cluster

`rediss` in place of `redis` is TLS. Options after `?`: ssl_ca_certs, ssl_certfile, ssl_keyfile,
ssl_check_hostname=false, ssl_cert_reqs=none; sentinel_username and sentinel_password.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from baton.base.addresses import join_address
from baton.base.errors import BatonError, ErrorKind

Reply = int | bytes | None | list["Reply"]
Argument = str | bytes | int
Script = Callable[[Sequence[str], Sequence[Argument]], Awaitable[Reply]]

CONNECT_S = 0.75
# A connection without an answer for this long is dropped.
ANSWER_S = 1.5
MAX_CONNECTIONS = 16

_DEFAULT_PORTS = {"single": 6379, "cluster": 6379, "sentinel": 26379}
_TLS_OPTIONS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs"}
_SENTINEL_OPTIONS = {"sentinel_username", "sentinel_password"}


class Client(Protocol):
    """The methods of a Redis client that Baton uses, for every kind of Redis."""

    def register_script(self, script: str) -> Script: ...
    async def ping(self) -> bool: ...
    async def aclose(self) -> None: ...


_Make = Callable[..., Client]
_single = cast(_Make, Redis)
_cluster = cast(_Make, RedisCluster)
_sentinel = cast(Callable[..., Sentinel], Sentinel)


@dataclass(frozen=True)
class Endpoint:
    """The location of Redis and its credentials; its text form shows no user name and no password."""

    kind: str
    hosts: tuple[tuple[str, int], ...]
    tls: bool = False
    db: int = 0
    service: str = ""
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    options: dict[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return ",".join(join_address(host, port) for host, port in self.hosts)


def parse_url(url: str) -> Endpoint:
    """Parses `url`. Raises BatonError(INVALID) with one line that never contains the password."""
    try:
        return _parse(urlsplit(url))
    except ValueError as error:
        raise BatonError(ErrorKind.INVALID, f"the URL of Redis: {error}") from None


def _parse(parts: SplitResult) -> Endpoint:
    scheme, _, kind = parts.scheme.partition("+")
    kind = kind or "single"
    if scheme not in ("redis", "rediss") or kind not in _DEFAULT_PORTS:
        raise ValueError("it begins with redis://, rediss://, redis+sentinel:// or redis+cluster://")
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    service, db = _service_and_db(kind, parts.path)
    allowed = _TLS_OPTIONS | (_SENTINEL_OPTIONS if kind == "sentinel" else set())
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(options) - allowed):
        raise ValueError(f"unknown option {unknown[0]}")
    return Endpoint(
        kind=kind,
        hosts=_hosts(hosts, _DEFAULT_PORTS[kind], single=kind == "single"),
        tls=scheme == "rediss",
        db=db,
        service=service,
        username=unquote(username) or None,
        password=unquote(password) or None,
        options=options,
    )


def _service_and_db(kind: str, path: str) -> tuple[str, int]:
    words = [unquote(word) for word in path.split("/") if word]
    service = words.pop(0) if kind == "sentinel" and words else ""
    if kind == "sentinel" and not service:
        raise ValueError("Sentinel needs the name of its service: redis+sentinel://HOST:PORT/SERVICE")
    if kind == "cluster" and words:
        raise ValueError("a Redis Cluster has no numbered databases")
    if len(words) > 1 or (words and not words[0].isdecimal()):
        raise ValueError("its path is the number of the database")
    return service, int(words[0]) if words else 0


def _hosts(text: str, default_port: int, single: bool) -> tuple[tuple[str, int], ...]:
    hosts = []
    for piece in text.split(","):
        location = urlsplit(f"//{piece}")
        if not location.hostname:
            raise ValueError("it names no host")
        hosts.append((location.hostname, default_port if location.port is None else location.port))
    if single and len(hosts) > 1:
        raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    return tuple(hosts)


def make_client(endpoint: Endpoint) -> Client:
    """A client that has not connected yet; connecting and every answer have deadlines."""
    options: dict[str, object] = {
        "username": endpoint.username,
        "password": endpoint.password,
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": ANSWER_S,
        "protocol": 2,
        "driver_info": None,
        # One retry where a connection turns out to be dead; every script is idempotent.
        "retry": Retry(NoBackoff(), 1, (RedisConnectionError,)),
    }
    if endpoint.tls:
        options |= {"ssl": True} | _tls_options(endpoint.options)
    if endpoint.kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in endpoint.hosts]
        return _cluster(startup_nodes=nodes, max_connections=MAX_CONNECTIONS, **options)
    options |= {"db": endpoint.db, "max_connections": MAX_CONNECTIONS}
    if endpoint.kind == "sentinel":
        return _SentinelClient(endpoint, options)
    ((host, port),) = endpoint.hosts
    return _single(host=host, port=port, **options)


def _tls_options(options: dict[str, str]) -> dict[str, object]:
    chosen: dict[str, object] = {key: value for key, value in options.items() if key in _TLS_OPTIONS}
    if "ssl_check_hostname" in options:
        chosen["ssl_check_hostname"] = options["ssl_check_hostname"].lower() not in ("false", "0", "no")
    return chosen


class _SentinelClient:
    """A client of the master, and of the Sentinels that locate it; closed together."""

    def __init__(self, endpoint: Endpoint, options: dict[str, object]) -> None:
        shared = ("socket_", "ssl", "protocol", "driver_info", "retry")
        own = {key: value for key, value in options.items() if key.startswith(shared)}
        own["username"] = endpoint.options.get("sentinel_username")
        own["password"] = endpoint.options.get("sentinel_password")
        # Shorter deadlines, so that there is time for the other Sentinels.
        own |= {"socket_connect_timeout": CONNECT_S / 2, "socket_timeout": ANSWER_S / 3}
        self._sentinel = _sentinel(list(endpoint.hosts), sentinel_kwargs=own)
        self._master: Client = cast("_Make", self._sentinel.master_for)(endpoint.service, **options)

    def register_script(self, script: str) -> Script:
        return self._master.register_script(script)

    async def ping(self) -> bool:
        return await self._master.ping()

    async def aclose(self) -> None:
        try:
            await self._master.aclose()
        finally:
            await self._sentinel.aclose()
