"""`baton worker`: one worker in this very process, started and watched by somebody else."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, NoReturn

from pydantic import ValidationError

from baton.cli import settings
from baton.cli.local_cluster import ROLES
from baton.cli.model_folder import require_weights
from baton.cli.up import require_free
from baton.engine.model_source import resolve_model
from services.common.child import DETACHED
from services.common.config import UpConfig, WorkerConfig


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", choices=ROLES, required=True)
    parser.add_argument("--model", required=True, metavar="DIR", help="checkpoint to serve")
    parser.add_argument("--name", help="stable name within the cluster (default: the role)")
    parser.add_argument(
        "--host", default=WorkerConfig.model_fields["host"].default, help="address to listen on"
    )
    parser.add_argument("--port", default="0", help="0: any free port, told in the ready line on stdout")
    parser.add_argument("--metrics-port", default="0", help="0: any free port, told in the ready line")
    settings.add_flags(parser, only="engine.")


def run(arguments: argparse.Namespace) -> int:
    """Becomes `python -m services.worker`, which reads its configuration from stdin."""
    config = worker_config(arguments)
    require_weights(resolve_model(config.model), config.engine.weights)
    if config.port:
        require_free(config.host, config.port, "--port")
    if config.metrics_port:
        require_free(config.host, config.metrics_port, "--metrics-port")
    _become_worker(config)


def worker_config(arguments: argparse.Namespace) -> WorkerConfig:
    """`BatonError(INVALID)` with one line for a bad flag."""
    engine: dict[str, Any] = {
        flag.path.removeprefix("engine."): getattr(arguments, flag.key)
        for flag in settings.FLAGS
        if flag.path.startswith("engine.") and getattr(arguments, flag.key) is not None
    }
    try:
        return WorkerConfig(
            name=arguments.name or arguments.role,
            role=arguments.role,
            model=arguments.model,
            host=arguments.host,
            port=arguments.port,
            metrics_port=arguments.metrics_port,
            engine=UpConfig.model_validate({"engine": engine}).engine,
        )
    except ValidationError as error:
        raise settings.invalid(settings.first_line(error)) from None


def _become_worker(config: WorkerConfig) -> NoReturn:
    descriptor = os.memfd_create("baton-worker-config")
    os.write(descriptor, config.model_dump_json().encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, sys.stdin.fileno())
    os.execv(sys.executable, [sys.executable, "-m", "services.worker", DETACHED])
