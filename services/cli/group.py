"""`baton worker-group`: runs the workers of one container, each on a GPU of its own, and restarts them."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Mapping

from pydantic import ValidationError

from services.cli import worker_file
from services.cli.common import extras
from services.cli.common.become import become
from services.cli.common.config_file import invalid
from services.cli.up import settings
from services.cli.up.command import require_free
from services.common.config.cluster import GroupConfig
from services.common.config.files import WorkerGroupFile
from services.common.config.ports import check_port_ranges
from services.common.config.types import Role
from services.common.config.worker import WorkerConfig

MOST_WORKERS = 16


def add_flags(parser: argparse.ArgumentParser) -> None:
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", dest=f"{role}_workers", type=int, required=True, metavar="N", help=f"{role} workers"
        )
    worker_file.add_config_flag(parser, WorkerGroupFile, required=True)
    worker_file.add_place_flags(
        parser, "name of the group, unique in the cluster; its workers are NAME-prefill-0, …", "random"
    )
    parser.add_argument("--model", metavar="DIR", help="checkpoint folder")
    settings.add_flags(parser, only=(*worker_file.FLAGS, "worker_metrics_port"))


def run(arguments: argparse.Namespace) -> int:
    """Replaces this process by `python -m services.cluster.group`, which reads its configuration from
    stdin."""
    extras.require("worker")
    config = group_config(arguments, os.environ)
    if config.admin_http_port:
        require_free(config.admin_http_host, config.admin_http_port, "worker.admin_http_port")
    become("services.cluster.group", config)


def group_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> GroupConfig:
    """The group's configuration. Raises `BatonError(INVALID)` with one line for a wrong flag or key."""
    counts: dict[Role, int] = {"prefill": arguments.prefill_workers, "decode": arguments.decode_workers}
    if min(counts.values()) < 0 or not 1 <= sum(counts.values()) <= MOST_WORKERS:
        raise invalid(f"a group has 1 to {MOST_WORKERS} workers (--prefill and --decode)")
    file = worker_file.load(arguments, environment, WorkerGroupFile, {"model": arguments.model})
    _check_ports(file, sum(counts.values()))
    host = worker_file.host_of(arguments, environment)
    name = worker_file.name_of(arguments, environment) or f"group-{secrets.token_hex(4)}"
    listen_host = worker_file.listen_host_of(environment)
    common = worker_file.common(file, host, listen_host)
    try:
        return GroupConfig(
            ray_address="none",
            cluster_id="group",
            group=name,
            workers=tuple(_workers(common, file, name, counts)),
            admin_http_host=listen_host or host,
            admin_http_port=file.worker.admin_http_port,
            restart_always=True,
            start_timeout_s=file.start_timeout_s,
            drain_s=file.drain_s,
            log_level=file.log_level,
        )
    except ValidationError as error:
        raise invalid(settings.first_line(error)) from None


def _workers(
    common: worker_file.Common, file: WorkerGroupFile, group: str, counts: Mapping[Role, int]
) -> list[WorkerConfig]:
    """The configuration of each worker, prefill first; the ports of each are one higher than those of the
    one before."""
    first = file.worker_metrics_port
    names = [(role, index) for role, count in counts.items() for index in range(count)]
    return [
        common.worker(
            f"{group}-{role}-{index}",
            role,
            group=group,
            engine=file.engine.with_gpu_links(role, counts["prefill"], counts["decode"], file.transfer),
            transfer=file.transfer.of_worker(place),
            port=file.worker.port and file.worker.port + place,
            metrics_port=first and first + place,
        )
        for place, (role, index) in enumerate(names)
    ]


def _check_ports(file: WorkerGroupFile, workers: int) -> None:
    """Raises `BatonError(INVALID)` where ports overlap or there are too few."""
    try:
        check_port_ranges(
            (
                ("worker.admin_http_port", file.worker.admin_http_port, 1),
                ("worker.port", file.worker.port, workers),
                ("transfer.transfer_port", file.transfer.transfer_port, workers),
                ("transfer.frames_port", file.transfer.frames_port, workers),
                ("worker_metrics_port", file.worker_metrics_port, workers),
            )
        )
    except ValueError as error:
        raise invalid(str(error)) from None
