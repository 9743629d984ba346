"""`baton worker`: runs one worker in this process, without supervision."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from baton.base.cluster_auth import SECRET_VARIABLE, prefix_secret
from baton.engine.model.source import resolve_model
from services.cli import worker_file
from services.cli.common import extras
from services.cli.common.become import become
from services.cli.common.config_file import invalid
from services.cli.up import settings
from services.cli.up.command import require_free
from services.cli.up.local_cluster import ROLES
from services.cli.up.model_folder import DEMO, model_and_name, require_weights
from services.common.config.files import WorkerFile
from services.common.config.state import NO_STATE, StateConfig, StateSettings
from services.common.config.up import UpConfig
from services.common.config.worker import WorkerConfig


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", choices=ROLES, required=True, help="what the worker does")
    parser.add_argument("--model", metavar="DIR", help=f"checkpoint folder, or {DEMO}; required without FILE")
    worker_file.add_config_flag(parser, WorkerFile, required=False)
    worker_file.add_place_flags(
        parser, "unique name in the cluster", "the role, with --redis-url plus random digits"
    )
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
    settings.add_flags(parser, only=(*worker_file.FLAGS, "prefix_secret"))


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
    if arguments.config is not None:
        return _from_file(arguments, environment)
    if arguments.model is None:
        raise invalid("a worker needs --model or --config")
    return _from_flags(arguments, environment)


def _from_file(arguments: argparse.Namespace, environment: Mapping[str, str]) -> WorkerConfig:
    if arguments.prefix_secret is not None:
        raise invalid("with --config the prefix secret is in a file, prefix_secret_file")
    del arguments.prefix_secret  # its variable is for a worker without a file
    overrides = {
        "model": arguments.model,
        "worker.port": arguments.port,
        "worker.admin_http_port": arguments.admin_http_port,
    }
    file = worker_file.load(arguments, environment, WorkerFile, overrides)
    host, listen_host = worker_file.host_of(arguments, environment), worker_file.listen_host_of(environment)
    common = worker_file.common(file, host, listen_host)
    return common.worker(
        worker_file.name_of(arguments, environment) or default_name(arguments.role, common.state),
        arguments.role,
        engine=file.engine.with_gpu_links(arguments.role, 1, 1, file.transfer),
        port=file.worker.port,
        metrics_port=arguments.metrics_port,
        admin_http_port=file.worker.admin_http_port,
    )


def _from_flags(arguments: argparse.Namespace, environment: Mapping[str, str]) -> WorkerConfig:
    values: dict[str, Any] = {}
    settings.take_flags(values, arguments, environment)
    host = worker_file.host_of(arguments, environment)
    try:
        common = settings.with_cluster_secret(UpConfig.model_validate(values))
        state = state_config(common.state, host)
        model, served_name = arguments.model, common.served_model_name
        if model == DEMO and not Path(model).is_dir():
            model, name = model_and_name(model)
            served_name = served_name or name
        return WorkerConfig(
            name=worker_file.name_of(arguments, environment) or default_name(arguments.role, state),
            role=arguments.role,
            model=str(model),
            host=host,
            listen_host=worker_file.listen_host_of(environment),
            port=arguments.port or 0,
            metrics_port=arguments.metrics_port or 0,
            admin_http_port=arguments.admin_http_port,
            canary=arguments.admin_http_port is not None,
            served_model_name=served_name,
            engine=common.engine_of(arguments.role),
            transfer=common.transfer,
            state=state,
            prefix_secret=_prefix_secret(common),
            cluster_secret=common.cluster_secret or "",
            tracing=common.tracing,
            log_level=common.log_level,
        )
    except ValidationError as error:
        raise invalid(settings.first_line(error)) from None


def _prefix_secret(common: UpConfig) -> str:
    """The configured prefix secret, else the one derived from the cluster secret, as in `baton up`."""
    derived = prefix_secret(common.cluster_secret) if common.cluster_secret else ""
    return common.prefix_secret or derived


def state_config(given: StateSettings, host: str) -> StateConfig | None:
    """The registry that the worker joins, if `--redis-url` is set."""
    if given.redis_url is None or given.redis_url == NO_STATE:
        return None
    settings.check_redis_url(given)
    if given.namespace is None:
        raise invalid("--redis-url needs --redis-namespace, the namespace of the cluster to join")
    worker_file.check_reachable(host)
    return StateConfig(redis_url=given.redis_url, namespace=given.namespace)


def default_name(role: str, state: StateConfig | None) -> str:
    """The role, with random digits in a registry, where names must be unique."""
    return role if state is None else f"{role}-{secrets.token_hex(4)}"
