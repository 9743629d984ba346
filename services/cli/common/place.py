"""Address and name of a worker's process, which container platforms set by variables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from services.common.config.settings_tree.variables import HOST_VARIABLE, LISTEN_VARIABLE, NAME_VARIABLE
from services.common.config.worker import WorkerConfig

_HOST: str = WorkerConfig.model_fields["host"].default


def add_place_flags(parser: argparse.ArgumentParser, name: str, default_name: str) -> None:
    """Adds `--host` and `--name`; `name` says what is named."""
    parser.add_argument("--host", help=f"address to listen on (default ${HOST_VARIABLE}, else {_HOST})")
    parser.add_argument("--name", help=f"{name} (default ${NAME_VARIABLE}, else {default_name})")


def host_of(arguments: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """The address to listen on, by flag or variable."""
    return arguments.host or environment.get(HOST_VARIABLE) or _HOST


def listen_host_of(environment: Mapping[str, str]) -> str | None:
    """The address that ports are bound to where it is not the one that others reach; None: the same."""
    return environment.get(LISTEN_VARIABLE) or None


def name_of(arguments: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """The configured name, by flag or variable; None where there is none."""
    return arguments.name or environment.get(NAME_VARIABLE) or None
