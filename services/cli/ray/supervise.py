"""`baton ray supervise`: runs the workers of an existing Ray cluster, wherever it has room for them.

Only paths of secrets are handed on: Ray's control store keeps the arguments of actors.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from services.cli.common import extras, process_configs
from services.cli.common.become import become_group
from services.cli.common.messages import warn
from services.cli.common.place import add_place_flags, host_of, listen_host_of, name_of
from services.cli.up.model_folder import DEMO, model_and_name
from services.common.config.cluster import ClusterConfig
from services.common.config.settings_tree import reader
from services.common.config.settings_tree.reader import invalid
from services.common.config.settings_tree.secrets import read_secret_files
from services.common.config.settings_tree.settings import Settings
from services.common.config.settings_tree.views import SUPERVISE
from services.common.config.state import NO_STATE, StateConfig
from services.common.config.types import Role
from services.common.config.worker import WorkerConfig

# Workers of a Ray node, each with ports of its own.
_MOST_PLACES = 16
# What is left of `drain_s` once the last worker must have ended, to leave Ray.
_LEAVE_S, _LEAVE_SHARE = 1.5, 0.1
_ROLES: tuple[Role, ...] = ("prefill", "decode")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_place_flags(parser, "name of the supervisor in its metrics", "supervisor")
    reader.add_flags(parser, SUPERVISE)


def run(arguments: argparse.Namespace) -> int:
    """Replaces this process by `python -m services.cluster.group`, which reads its configuration from
    stdin."""
    extras.require("cluster")
    become_group(supervise_config(arguments, os.environ))


def supervise_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> ClusterConfig:
    """The supervisor's configuration, which has no secret. Raises `BatonError(INVALID)` with one line for a
    wrong flag or key, or a secret that cannot be read."""
    settings = reader.read(SUPERVISE, arguments, environment, warn=warn)
    if not any(settings.role_counts.values()):
        raise invalid("prefill and decode are both 0")
    supervision = settings.supervision
    if not supervision.on_another_ray:
        raise invalid(f"supervision.ray_address is {supervision.ray_address or 'unset'}, not Ray's HOST:PORT")
    _check_ports(settings)
    host = host_of(arguments, environment)
    process_configs.check_reachable(host)
    return ClusterConfig(
        ray_address=supervision.ray_address,
        hang_timeout_s=supervision.hang_timeout_s,
        cluster_id=cluster_id(settings.state.namespace or ""),
        workers=tuple(_workers(settings, host)),
        secret_files=_secret_files(settings),
        detached=True,
        restart_always=True,
        start_timeout_s=settings.start_timeout_s,
        drain_s=settings.drain_s - min(_LEAVE_S, _LEAVE_SHARE * settings.drain_s),
        log_level=settings.log_level,
        name=name_of(arguments, environment) or "supervisor",
        host=host,
        admin_http_host=listen_host_of(environment),
        admin_http_port=settings.worker.admin_http_port,
    )


def cluster_id(namespace: str) -> str:
    """The name of the workers' Ray namespace, the same at each start of the supervisor."""
    readable = re.sub("[^0-9a-z-]", "-", namespace.lower())
    return f"{readable}-{hashlib.sha256(namespace.encode()).hexdigest()[:8]}"


def _workers(settings: Settings, host: str) -> list[WorkerConfig]:
    """The configuration of each worker, prefill first, as it is at the first place of its Ray node, which
    adds name and address."""
    given = settings.model or DEMO
    folder, name = model_and_name(given) if given == DEMO else (Path(given), Path(given).name)
    return [
        process_configs.worker_config(
            settings,
            role,
            name=f"{role}-{index}",
            model=str(folder),
            served_model_name=settings.served_model_name or name,
            host=host,
            state=_state(settings.state),
            port=settings.worker.port,
            metrics_port=settings.worker_metrics_port,
            canary=True,
        )
        for role in _ROLES
        for index in range(settings.role_counts[role])
    ]


def _state(state: StateConfig) -> StateConfig:
    if state.redis_url == NO_STATE:
        raise invalid(f"state.redis_url: routers find workers in Redis, so it cannot be {NO_STATE}")
    if state.redis_url is not None:
        process_configs.check_redis_url(state)
        if "@" in state.redis_url or "?" in state.redis_url:
            raise invalid("state.redis_url may hold credentials, which Ray would keep: use redis_url_file")
    return state.model_copy(update={"redis_url": state.redis_url or ""})


def _secret_files(settings: Settings) -> dict[str, Path]:
    """The files, whose secrets can be read here; workers read them on their own nodes."""
    named = {
        "cluster_secret": settings.cluster_secret_file,
        "prefix_secret": settings.prefix_secret_file,
        "redis_url": settings.state.redis_url_file,
    }
    files = {name: path.absolute() for name, path in named.items() if path is not None}
    url = read_secret_files(files).get("redis_url")
    process_configs.check_redis_url(StateConfig(redis_url=url))
    return files


def _check_ports(settings: Settings) -> None:
    """Raises `BatonError(INVALID)` where the ports of a Ray node's workers overlap or are too few."""
    first = (
        ("worker.port", settings.worker.port),
        ("transfer.transfer_port", settings.transfer.transfer_port),
        ("transfer.frames_port", settings.transfer.frames_port),
        ("worker_metrics_port", settings.worker_metrics_port),
    )
    process_configs.check_ports((name, port, _MOST_PLACES) for name, port in first)
