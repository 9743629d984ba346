"""`baton worker group`: runs the workers of one container, each on a GPU of its own, and restarts them."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Mapping

from services.cli.common import extras, process_configs
from services.cli.common.become import become_group
from services.cli.common.messages import warn
from services.cli.common.place import add_place_flags, host_of, listen_host_of, name_of
from services.cli.up.model_folder import model_of, require_weights
from services.common.config.cluster import ClusterConfig
from services.common.config.settings_tree import reader
from services.common.config.settings_tree.reader import invalid
from services.common.config.settings_tree.settings import Settings
from services.common.config.settings_tree.views import WORKER_GROUP
from services.common.config.types import Role
from services.common.config.worker import WorkerConfig

MOST_WORKERS = 16
_ROLES: tuple[Role, ...] = ("prefill", "decode")


def add_flags(parser: argparse.ArgumentParser) -> None:
    for role in _ROLES:
        parser.add_argument(f"--{role}", type=int, required=True, metavar="N", help=f"{role} workers")
    add_place_flags(
        parser, "name of the group, unique in the cluster; its workers are NAME-prefill-0, …", "random"
    )
    reader.add_flags(parser, WORKER_GROUP, usage="--prefill N --decode N")


def run(arguments: argparse.Namespace) -> int:
    """Replaces this process by `python -m services.cluster.group`, which reads its configuration from
    stdin."""
    extras.require("worker")
    become_group(group_config(arguments, os.environ))


def group_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> ClusterConfig:
    """The group's configuration. Raises `BatonError(INVALID)` with one line for a wrong flag or key."""
    counts = {"prefill": arguments.prefill, "decode": arguments.decode}
    if min(counts.values()) < 0 or not 1 <= sum(counts.values()) <= MOST_WORKERS:
        raise invalid(f"a group has 1 to {MOST_WORKERS} workers (--prefill and --decode)")
    settings = reader.read(WORKER_GROUP, arguments, environment, counts, warn)
    _check_ports(settings, sum(counts.values()))
    host, listen_host = host_of(arguments, environment), listen_host_of(environment)
    name = name_of(arguments, environment) or f"group-{secrets.token_hex(4)}"
    return ClusterConfig(
        ray_address="none",
        cluster_id="group",
        name=name,
        workers=tuple(_workers(settings, host, listen_host, name)),
        host=host,
        admin_http_host=listen_host,
        admin_http_port=settings.worker.admin_http_port,
        restart_always=True,
        start_timeout_s=settings.start_timeout_s,
        drain_s=settings.drain_s,
        log_level=settings.log_level,
    )


def _workers(settings: Settings, host: str, listen_host: str | None, group: str) -> list[WorkerConfig]:
    """The configuration of each worker, prefill first; the ports of each are one higher than those of the
    one before."""
    folder, served_name = model_of(settings)
    require_weights(folder, settings.engine.weights)
    first, port = settings.worker_metrics_port, settings.worker.port
    names = [(role, index) for role in _ROLES for index in range(settings.role_counts[role])]
    return [
        process_configs.worker_config(
            settings,
            role,
            name=f"{group}-{role}-{index}",
            group=group,
            model=str(folder),
            served_model_name=settings.served_model_name or served_name,
            host=host,
            listen_host=listen_host,
            state=process_configs.registry_of(settings, host),
            transfer=settings.transfer.of_worker(place),
            port=port and port + place,
            metrics_port=first and first + place,
            canary=True,
        )
        for place, (role, index) in enumerate(names)
    ]


def _check_ports(settings: Settings, workers: int) -> None:
    """Raises `BatonError(INVALID)` where ports overlap or there are too few."""
    process_configs.check_ports(
        (
            ("worker.admin_http_port", settings.worker.admin_http_port, 1),
            ("worker.port", settings.worker.port, workers),
            ("transfer.transfer_port", settings.transfer.transfer_port, workers),
            ("transfer.frames_port", settings.transfer.frames_port, workers),
            ("worker_metrics_port", settings.worker_metrics_port, workers),
        )
    )
