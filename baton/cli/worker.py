"""`baton worker`: runs one worker in this process, without supervision."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from baton.cli.common import extras
from baton.cli.common.become import become
from baton.cli.common.config_file import invalid
from baton.cli.up import settings
from baton.cli.up.command import require_free
from baton.cli.up.local_cluster import ROLES
from baton.cli.up.model_folder import require_weights
from baton.cluster_auth import SECRET_VARIABLE, prefix_secret
from baton.engine.model.source import resolve_model
from services.common.config.state import NO_STATE, StateConfig, StateSettings
from services.common.config.up import UpConfig
from services.common.config.worker import WorkerConfig


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", choices=ROLES, required=True, help="what the worker does")
    parser.add_argument("--model", required=True, metavar="DIR", help="checkpoint folder")
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="model name for clients (default: the folder's name)"
    )
    parser.add_argument(
        "--name",
        help="unique name in the cluster (default: the role, with --redis-url plus random digits)",
    )
    parser.add_argument(
        "--host", default=WorkerConfig.model_fields["host"].default, help="address to listen on"
    )
    parser.add_argument(
        "--port", default="0", help="gRPC port; 0: any free port, reported in the ready line on stdout"
    )
    parser.add_argument(
        "--metrics-port", default="0", help="metrics port; 0: any free port, reported in the ready line"
    )
    settings.add_flags(parser, only=("engine.", "transfer.", "state.", "prefix_secret", "cluster_secret"))


def run(arguments: argparse.Namespace) -> int:
    """Replaces this process by `python -m services.worker`, which reads its configuration from stdin."""
    extras.require("worker")
    config = worker_config(arguments, os.environ)
    require_weights(resolve_model(config.model), config.engine.weights)
    if config.port:
        require_free(config.host, config.port, "--port")
    if config.metrics_port:
        require_free(config.host, config.metrics_port, "--metrics-port")
    if config.transfer.transfer_port and config.role == "decode":
        require_free(config.host, config.transfer.transfer_port, "--transfer-port")
    if not config.cluster_secret:  # without it neither could authenticate the other
        raise invalid(f"a worker needs its cluster's secret: set {SECRET_VARIABLE} or --cluster-secret-file")
    become("services.worker", config)


def worker_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> WorkerConfig:
    """The worker's configuration. Raises `BatonError(INVALID)` with one line for a wrong flag."""
    values: dict[str, Any] = {}
    settings.take_flags(values, arguments, environment)
    try:
        common = settings.with_cluster_secret(UpConfig.model_validate(values))
        state = state_config(common.state, arguments.host)
        return WorkerConfig(
            name=arguments.name or default_name(arguments.role, state),
            role=arguments.role,
            model=arguments.model,
            host=arguments.host,
            port=arguments.port,
            metrics_port=arguments.metrics_port,
            served_model_name=common.served_model_name,
            engine=common.engine_of(arguments.role),
            transfer=common.transfer,
            state=state,
            prefix_secret=_prefix_secret(common),
            cluster_secret=common.cluster_secret or "",
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
    if host in ("0.0.0.0", "::"):
        raise invalid(f"--host {host} is not an address that routers can reach, as --redis-url needs")
    return StateConfig(redis_url=given.redis_url, namespace=given.namespace)


def default_name(role: str, state: StateConfig | None) -> str:
    """The role, with random digits in a registry, where names must be unique."""
    return role if state is None else f"{role}-{secrets.token_hex(4)}"
