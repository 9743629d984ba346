"""`baton supervise`: runs the workers of an existing Ray cluster, wherever it has room for them.

Only paths of secrets are handed on: Ray's control store keeps the arguments of actors.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from services.cli import worker_file
from services.cli.common import extras
from services.cli.common.become import become
from services.cli.common.config_file import first_problem, invalid
from services.cli.up import settings
from services.cli.up.command import require_free
from services.cli.up.model_folder import DEMO, model_and_name
from services.common.config.cluster import ClusterConfig, DetachedSettings, SecretFiles, SuperviseConfig
from services.common.config.files import StateFile, SuperviseFile
from services.common.config.ports import check_port_ranges
from services.common.config.secrets import read_secret_files
from services.common.config.state import NO_STATE, StateConfig, StateSettings
from services.common.config.types import Role
from services.common.config.worker import WorkerConfig

# Workers of a Ray node, each with ports of its own.
_MOST_PLACES = 16
# What is left of `drain_s` once the last worker must have ended, to leave Ray.
_LEAVE_S, _LEAVE_SHARE = 1.5, 0.1
_ROLES: tuple[Role, ...] = ("prefill", "decode")


def add_flags(parser: argparse.ArgumentParser) -> None:
    worker_file.add_config_flag(parser, SuperviseFile, required=True)
    worker_file.add_place_flags(parser, "name of the supervisor in its metrics", "supervisor")
    parser.add_argument("--model", metavar="DIR", help="checkpoint folder on the Ray nodes")
    for role in _ROLES:
        parser.add_argument(
            f"--{role}", dest=f"{role}_workers", type=int, metavar="N", help=f"{role} workers"
        )
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="address of Ray's head node")
    settings.add_flags(parser, only=(*worker_file.FLAGS, "worker_metrics_port"))


def run(arguments: argparse.Namespace) -> int:
    """Replaces this process by `python -m services.cluster.detached`, which reads its configuration from
    stdin."""
    extras.require("cluster")
    config = supervise_config(arguments, os.environ)
    if config.admin_http_port:
        require_free(config.bound_admin_http_host, config.admin_http_port, "worker.admin_http_port")
    become("services.cluster.detached", config)


def supervise_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> SuperviseConfig:
    """The supervisor's configuration, which has no secret. Raises `BatonError(INVALID)` with one line for a
    wrong flag or key, or a secret that cannot be read."""
    overrides = {
        "model": arguments.model,
        "prefill": arguments.prefill_workers,
        "decode": arguments.decode_workers,
        "supervision.ray_address": arguments.ray_address,
    }
    file = worker_file.load(arguments, environment, SuperviseFile, overrides)
    if not file.prefill + file.decode:
        raise invalid("prefill and decode are both 0")
    if not file.supervision.on_another_ray:
        raise invalid(f"supervision.ray_address is {file.supervision.ray_address}, not Ray's HOST:PORT")
    _check_ports(file)
    host = worker_file.host_of(arguments, environment)
    worker_file.check_reachable(host)
    secret_files = _secret_files(file)
    try:
        cluster = ClusterConfig(
            ray_address=file.supervision.ray_address,
            hang_timeout_s=file.supervision.hang_timeout_s,
            cluster_id=cluster_id(file.state.namespace),
            workers=tuple(_workers(file, host)),
            detached=DetachedSettings(secret_files=secret_files),
            restart_always=True,
            start_timeout_s=file.start_timeout_s,
            drain_s=file.drain_s - min(_LEAVE_S, _LEAVE_SHARE * file.drain_s),
            log_level=file.log_level,
        )
        return SuperviseConfig(
            cluster=cluster,
            name=worker_file.name_of(arguments, environment) or "supervisor",
            host=host,
            admin_http_host=worker_file.listen_host_of(environment),
            admin_http_port=file.worker.admin_http_port,
        )
    except ValidationError as error:
        raise invalid(first_problem(error)) from None


def cluster_id(namespace: str) -> str:
    """The name of the workers' Ray namespace, the same at each start of the supervisor."""
    readable = re.sub("[^0-9a-z-]", "-", namespace.lower())
    return f"{readable}-{hashlib.sha256(namespace.encode()).hexdigest()[:8]}"


def _workers(file: SuperviseFile, host: str) -> list[WorkerConfig]:
    """The configuration of each worker, prefill first, as it is at the first place of its Ray node, which
    adds name and address."""
    model, name = model_and_name(DEMO) if file.model == DEMO else (Path(file.model), Path(file.model).name)
    served_name = file.served_model_name or name
    common = worker_file.Common(file, host, model, served_name, _state(file.state), "", "")
    counts = {"prefill": file.prefill, "decode": file.decode}
    engines = {role: file.engine_for(role) for role in counts}  # type: ignore[arg-type]
    return [
        common.worker(
            f"{role}-{index}",
            role,
            engine=engines[role].with_gpu_links(role, file.prefill, file.decode, file.transfer),
            port=file.worker.port,
            metrics_port=file.worker_metrics_port,
        )
        for role in _ROLES
        for index in range(counts[role])
    ]


def _state(file: StateFile) -> StateConfig:
    if file.redis_url == NO_STATE:
        raise invalid(f"state.redis_url: routers find workers in Redis, so it cannot be {NO_STATE}")
    if file.redis_url is not None:
        settings.check_redis_url(StateSettings(redis_url=file.redis_url))
        if "@" in file.redis_url or "?" in file.redis_url:
            raise invalid("state.redis_url may hold credentials, which Ray would keep: use redis_url_file")
    return StateConfig(
        redis_url=file.redis_url or "", redis_url_file=file.redis_url_file, namespace=file.namespace
    )


def _secret_files(file: SuperviseFile) -> SecretFiles:
    """The files, whose secrets can be read here; workers read them on their own nodes."""
    files = SecretFiles(
        cluster_secret=file.cluster_secret_file.absolute(),
        prefix_secret=file.prefix_secret_file and file.prefix_secret_file.absolute(),
        redis_url=file.state.redis_url_file and file.state.redis_url_file.absolute(),
    )
    secrets = read_secret_files(files)
    if secrets.redis_url:
        settings.check_redis_url(StateSettings(redis_url=secrets.redis_url))
    return files


def _check_ports(file: SuperviseFile) -> None:
    """Raises `BatonError(INVALID)` where the ports of a Ray node's workers overlap or are too few."""
    first = (
        ("worker.port", file.worker.port),
        ("transfer.transfer_port", file.transfer.transfer_port),
        ("transfer.frames_port", file.transfer.frames_port),
        ("worker_metrics_port", file.worker_metrics_port),
    )
    try:
        check_port_ranges([(name, port, _MOST_PLACES) for name, port in first])
    except ValueError as error:
        raise invalid(str(error)) from None
