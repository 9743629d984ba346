"""The configurations of workers that a file describes, for `baton worker`, `worker-group` and `supervise`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from baton.base.cluster_auth import prefix_secret
from services.cli.common import config_file
from services.cli.common.config_file import invalid, read_secret, read_shared_secret
from services.cli.up import settings
from services.cli.up.model_folder import DEMO, model_and_name, require_weights
from services.common.config.files import StateFile, WorkerFile
from services.common.config.state import NO_STATE, StateConfig, StateSettings
from services.common.config.types import Role
from services.common.config.worker import WorkerConfig

File = TypeVar("File", bound=WorkerFile)

FLAGS = (
    "served_model_name",
    "engine.",
    "transfer.",
    "state.",
    "cluster_secret_file",
    "tracing.",
    "log_level",
)
"""Paths of the settings that these commands have flags for."""
HOST_VARIABLE, NAME_VARIABLE = "BATON_HOST", "BATON_NAME"
LISTEN_VARIABLE = "BATON_LISTEN_HOST"

_WILDCARDS = ("0.0.0.0", "::")
# What a worker needs to end once its requests have: the last of its streams, its registry entry, its engine.
_END_S, _END_SHARE = 3.0, 0.25


@dataclass(frozen=True, slots=True)
class Common:
    """What the workers of one file have in common, the secrets read from their files."""

    file: WorkerFile
    host: str
    model: Path
    served_name: str
    state: StateConfig | None
    cluster_secret: str
    prefix_secret: str
    listen_host: str | None = None

    def worker(self, name: str, role: Role, **own: Any) -> WorkerConfig:  # noqa: ANN401
        """The configuration of one worker; `own` has what differs between workers. Raises
        `BatonError(INVALID)` for an invalid name."""
        settings_of_all = {
            "name": name,
            "role": role,
            "model": str(self.model),
            "host": self.host,
            "listen_host": self.listen_host,
            "served_model_name": self.served_name,
            "engine": self.file.engine,
            "transfer": self.file.transfer,
            "state": self.state,
            "prefix_secret": self.prefix_secret,
            "cluster_secret": self.cluster_secret,
            "tls": self.file.tls.internal,
            "require_tls": self.file.require_tls,
            "tracing": self.file.tracing,
            "start_timeout_s": self.file.start_timeout_s,
            "canary": True,
            "drain_s": request_drain_s(self.file.drain_s),
            "log_level": self.file.log_level,
        }
        try:
            return WorkerConfig(**(settings_of_all | own))
        except ValidationError as error:
            raise invalid(settings.first_line(error)) from None


def add_config_flag(parser: argparse.ArgumentParser, model: type[WorkerFile], *, required: bool) -> None:
    """Adds `--config`, and the keys of its file to the help."""
    config_file.add_flag(parser, "YAML file, keys see below", required=required)
    parser.epilog = "Keys of FILE: " + ", ".join(config_file.keys_of(model)) + "."


def add_place_flags(parser: argparse.ArgumentParser, name: str, default_name: str) -> None:
    """Adds `--host` and `--name`; `name` says what is named."""
    host = WorkerConfig.model_fields["host"].default
    parser.add_argument("--host", help=f"address to listen on (default ${HOST_VARIABLE}, else {host})")
    parser.add_argument("--name", help=f"{name} (default ${NAME_VARIABLE}, else {default_name})")


def host_of(arguments: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """The address to listen on, by flag or variable."""
    default: str = WorkerConfig.model_fields["host"].default
    return arguments.host or environment.get(HOST_VARIABLE) or default


def listen_host_of(environment: Mapping[str, str]) -> str | None:
    """The address that ports are bound to where it is not the one that others reach; None: the same."""
    return environment.get(LISTEN_VARIABLE) or None


def name_of(arguments: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """The configured name, by flag or variable; None where there is none."""
    return arguments.name or environment.get(NAME_VARIABLE) or None


def load(
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    model: type[File],
    overrides: Mapping[str, object] | None = None,
) -> File:
    """The file that `--config` names, overridden by flags and variables; `overrides` are further ones, by
    path, of which None is left out. Raises `BatonError(INVALID)`."""
    given: dict[str, object] = dict(settings.given_flags(arguments, environment))
    given |= {path: value for path, value in (overrides or {}).items() if value is not None}
    return config_file.load(arguments.config, model, given)


def common(file: WorkerFile, host: str, listen_host: str | None) -> Common:
    """Resolves the model and reads the files of secrets. Raises `BatonError(INVALID)`."""
    if file.model != DEMO and not Path(file.model).is_dir():
        raise invalid(f"model {file.model}: no such folder")
    folder, name = model_and_name(file.model)
    require_weights(folder, file.engine.weights)
    secret = read_shared_secret(file.cluster_secret_file, "cluster_secret_file")
    hashing = file.prefix_secret_file
    return Common(
        file,
        host,
        folder,
        file.served_model_name or name,
        _state(file.state, host),
        secret,
        read_shared_secret(hashing, "prefix_secret_file") if hashing else prefix_secret(secret),
        listen_host,
    )


def request_drain_s(drain_s: float) -> float:
    """How long running requests may go on in a process that must exit within `drain_s` seconds of SIGTERM."""
    return drain_s - min(_END_S, _END_SHARE * drain_s)


def _state(file: StateFile, host: str) -> StateConfig | None:
    if file.redis_url == NO_STATE:
        return None
    check_reachable(host)
    path = file.redis_url_file
    url = file.redis_url if path is None else read_secret(path, "state.redis_url_file")
    assert url is not None  # the file has one of both
    settings.check_redis_url(StateSettings(redis_url=url))
    return StateConfig(redis_url=url, redis_url_file=path, namespace=file.namespace)


def check_reachable(host: str) -> None:
    """Raises `BatonError(INVALID)` for an address that cannot be registered, since it stands for all."""
    if host in _WILDCARDS:
        raise invalid(f"--host {host} is not an address that routers can reach, as --redis-url needs")
