"""`baton worker`: runs one worker in this process, without supervision."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Mapping

from baton.base.cluster_auth import SECRET_VARIABLE
from baton.engine.model.source import resolve_model
from services.cli.common import extras, process_configs
from services.cli.common.become import become
from services.cli.common.free_port import require_free
from services.cli.common.messages import warn
from services.cli.common.place import add_place_flags, host_of, listen_host_of, name_of
from services.cli.up.local_cluster import ROLES
from services.cli.up.model_folder import DEMO, model_of, require_weights
from services.common.config.settings_tree import reader
from services.common.config.settings_tree.reader import invalid
from services.common.config.settings_tree.settings import Settings
from services.common.config.settings_tree.views import WORKER, WORKER_WITH_FILE
from services.common.config.state import StateConfig
from services.common.config.worker import WorkerConfig


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", choices=ROLES, required=True, help="role of the worker")
    add_place_flags(parser, "unique name in the cluster", "the role, with --redis-url plus random digits")
    parser.add_argument(
        "--port", help="gRPC port (default 0: any free port, reported in the ready line on stdout)"
    )
    parser.add_argument(
        "--metrics-port",
        help="metrics port (default 0: any free port, reported in the ready line; with FILE none: the admin "
        "HTTP port has /metrics)",
    )
    parser.add_argument(
        "--admin-http-port", help="port of /health, /ready and /metrics (default: none without FILE)"
    )
    reader.add_flags(parser, WORKER, file=False, usage="--role ROLE")


def run(arguments: argparse.Namespace) -> int:
    """Replaces this process by `python -m services.worker`, which reads its configuration from stdin."""
    extras.require("worker")
    config = worker_config(arguments, os.environ)
    require_weights(resolve_model(config.model), config.engine.weights)
    require_free_ports(config)
    if not config.cluster_secret:  # without it neither could authenticate the other
        raise invalid(f"a worker needs its cluster's secret: set {SECRET_VARIABLE} or --cluster-secret-file")
    become("services.worker", config)


def require_free_ports(config: WorkerConfig) -> None:
    """Raises `BatonError(INVALID)` with the flag of a port that cannot be bound."""
    ports = [
        (config.port, "--port"),
        (config.metrics_port, "--metrics-port"),
        (config.admin_http_port, "--admin-http-port"),
    ]
    if config.receives_handoffs:
        ports.append((config.transfer.transfer_port, "--transfer-port"))
    for port, flag in ports:
        if port:
            require_free(config.bound_host, port, flag)


def worker_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> WorkerConfig:
    """The worker's configuration. Raises `BatonError(INVALID)` with one line for a wrong flag or key."""
    view = WORKER if arguments.config is None else WORKER_WITH_FILE
    given = {"worker.port": arguments.port, "worker.admin_http_port": arguments.admin_http_port}
    settings = reader.read(view, arguments, environment, given, warn)
    host = host_of(arguments, environment)
    state = process_configs.registry_of(settings, host)
    probed = arguments.config is not None or arguments.admin_http_port is not None
    return process_configs.worker_config(
        settings,
        arguments.role,
        name=name_of(arguments, environment) or default_name(arguments.role, state),
        host=host,
        listen_host=listen_host_of(environment),
        state=state,
        port=settings.worker.port,
        metrics_port=arguments.metrics_port or (0 if arguments.config is None else None),
        admin_http_port=settings.worker.admin_http_port if probed else None,
        canary=probed,
        **_model(settings, from_file=arguments.config is not None),
    )


def _model(settings: Settings, *, from_file: bool) -> dict[str, str | None]:
    """Model and its name; without a file a hub id, too, which `run` resolves."""
    if not from_file and settings.model != DEMO:
        return {"model": settings.model}
    folder, name = model_of(settings)
    return {"model": str(folder), "served_model_name": settings.served_model_name or name}


def default_name(role: str, state: StateConfig | None) -> str:
    """The role, with random digits in a registry, where names must be unique."""
    return role if state is None else f"{role}-{secrets.token_hex(4)}"
