"""The views of the settings that processes are started with: a router's, a worker's, and what both share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from services.common.config.ports import check_port_ranges
from services.common.config.router import RouterConfig
from services.common.config.settings_tree.reader import first_problem, invalid
from services.common.config.settings_tree.settings import Settings
from services.common.config.state import NO_STATE, StateConfig
from services.common.config.types import Role
from services.common.config.worker import WorkerConfig

_WILDCARDS = ("0.0.0.0", "::")
# What a worker needs to end once its requests have: the last of its streams, its registry entry, its engine.
_END_S, _END_SHARE = 3.0, 0.25


def router_config(settings: Settings, model: Path, name: str, state: StateConfig | None) -> RouterConfig:
    """The configuration of a router. `model`: folder with its tokenizer; `name`: of the model in the API."""
    return RouterConfig(
        **settings.router.model_dump(),
        model=str(model),
        served_model_name=settings.served_model_name or name,
        byte_tokenizer=settings.engine.weights == "random" and not (model / "tokenizer.json").is_file(),
        state=state,
        prefix_secret=settings.block_secret,
        cluster_secret=settings.cluster_secret or "",
        tls=settings.tls.internal,
        public_tls=settings.tls.public,
        auth=settings.auth,
        require_tls=settings.require_tls,
        tracing=settings.tracing,
        drain_s=settings.drain_s,
        log_level=settings.log_level,
    )


def worker_config(settings: Settings, role: Role, **own: Any) -> WorkerConfig:  # noqa: ANN401
    """The configuration of one worker; `own` has what differs between workers, such as its name, and goes
    before the settings. Raises `BatonError(INVALID)` where one of them is invalid."""
    values = {
        "role": role,
        "served_model_name": settings.served_model_name,
        "transfer": settings.transfer,
        "prefix_secret": settings.block_secret,
        "cluster_secret": settings.cluster_secret or "",
        "tls": settings.tls.internal,
        "require_tls": settings.require_tls,
        "tracing": settings.tracing,
        "start_timeout_s": settings.start_timeout_s,
        "drain_s": request_drain_s(settings.drain_s),
        "log_level": settings.log_level,
    } | own
    try:
        engine = settings.engine_of(role)
    except ValidationError as error:
        raise invalid(first_problem(error, f"engine_of_role.{role}")) from None
    try:
        return WorkerConfig(**({"engine": engine} | values))
    except ValidationError as error:
        raise invalid(first_problem(error)) from None


def registry_of(settings: Settings, host: str) -> StateConfig | None:
    """The registry that workers on the address `host` join; None where there is none to join. Raises
    `BatonError(INVALID)`."""
    state = settings.state
    if state.redis_url is None or state.redis_url == NO_STATE:
        return None
    check_redis_url(state)
    if state.namespace is None:
        raise invalid("--redis-url needs --redis-namespace, the namespace of the cluster to join")
    check_reachable(host)
    return state


def check_redis_url(state: StateConfig) -> None:
    """Raises `BatonError(INVALID)`, without the URL's secrets, where it is not a valid Redis URL."""
    if state.redis_url is not None and state.redis_url != NO_STATE:
        from baton.state.client.connect import parse_url  # imported late: it takes a fifth of a second

        parse_url(state.redis_url)


def check_reachable(host: str) -> None:
    """Raises `BatonError(INVALID)` for an address that cannot be registered, since it stands for all."""
    if host in _WILDCARDS:
        raise invalid(f"--host {host} is not an address that routers can reach, as --redis-url needs")


def check_ports(ranges: Iterable[tuple[str, int, int]]) -> None:
    """Raises `BatonError(INVALID)` where ports overlap or there are too few; see `check_port_ranges`."""
    try:
        check_port_ranges(ranges)
    except ValueError as error:
        raise invalid(str(error)) from None


def request_drain_s(drain_s: float) -> float:
    """Seconds for which running requests may go on in a process that must exit within `drain_s` seconds of
    SIGTERM."""
    return drain_s - min(_END_S, _END_SHARE * drain_s)
