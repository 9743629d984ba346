"""The secrets of a cluster, separate from the rest of its configuration.

On Ray, configurations are arguments of actors. Ray's control store keeps those in memory, and in a database
if one is configured, so secrets are not among them: each machine reads them from a file or its environment.

    public = without_secrets(worker)                            at `baton up`, for Ray
    with_secrets(public, find_secrets(config, os.environ))      where the worker starts
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from baton.base.cluster_auth import MIN_SECRET_LENGTH, prefix_secret
from baton.base.errors import BatonError, ErrorKind
from services.common.config.cluster import ClusterConfig, SecretFiles
from services.common.config.types import StrictModel
from services.common.config.worker import WorkerConfig


class Secrets(StrictModel):
    """The content of a secrets file; empty: not given. Its repr shows none of them."""

    redis_url: str = Field("", repr=False)
    prefix_secret: str = Field("", repr=False)
    cluster_secret: str = Field("", repr=False)

    @property
    def given(self) -> dict[str, str]:
        """Those that are given, by name."""
        return {name: value for name, value in self.model_dump().items() if value}


VARIABLES: Mapping[str, str] = {name: f"BATON_{name.upper()}" for name in Secrets.model_fields}
"""The environment variable of each secret."""


def secrets_of(worker: WorkerConfig) -> Secrets:
    """The secrets in a worker's configuration."""
    url = worker.state.redis_url if worker.state else ""
    # A URL without credentials is no secret, and workers on other machines need it.
    return Secrets(
        redis_url=url if "@" in url or "?" in url else "",
        prefix_secret=worker.prefix_secret,
        cluster_secret=worker.cluster_secret,
    )


def without_secrets(worker: WorkerConfig) -> WorkerConfig:
    """The configuration with its secrets empty."""
    return _replace(worker, dict.fromkeys(secrets_of(worker).given, ""))


def with_secrets(worker: WorkerConfig, secrets: Secrets) -> WorkerConfig:
    """The configuration that `without_secrets` returned, with its secrets again."""
    return _replace(worker, secrets.given)


def read_secret_files(files: SecretFiles) -> Secrets:
    """The secrets of a cluster whose configuration names a file for each.

    Raises BatonError(INVALID), whose message has the path and no secret.
    """
    cluster_secret = read_secret_file(files.cluster_secret, "cluster_secret_file")
    if len(cluster_secret) < MIN_SECRET_LENGTH:
        raise _invalid(
            f"cluster_secret_file {files.cluster_secret} holds fewer than {MIN_SECRET_LENGTH} characters"
        )
    given, url = files.prefix_secret, files.redis_url
    return Secrets(
        cluster_secret=cluster_secret,
        prefix_secret=read_secret_file(given, "prefix_secret_file")
        if given
        else prefix_secret(cluster_secret),
        redis_url=read_secret_file(url, "state.redis_url_file") if url else "",
    )


def read_secret_file(path: Path, name: str) -> str:
    """The content of a file of one secret, without surrounding white space. Raises BatonError(INVALID)."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise _invalid(f"cannot read {name} {path}: {reason}") from None
    if not secret:
        raise _invalid(f"{name} {path} is empty")
    return secret


def find_secrets(config: ClusterConfig, environment: Mapping[str, str]) -> Secrets:
    """The secrets that `config` names, as found on this machine: a file for each, or `config.secrets_file`
    before `environment`.

    Raises BatonError(INVALID) where one is missing.
    """
    if config.detached is not None:
        return read_secret_files(config.detached.secret_files)
    if not config.secret_names:
        return Secrets()
    file = config.secrets_file
    found = {name: environment[variable] for name, variable in VARIABLES.items() if variable in environment}
    found |= read_secrets(file).given if file is not None else {}
    for name in config.secret_names:
        if not found.get(name):
            other = f"secrets_file {file} has no {name}" if file is not None else "no secrets_file is named"
            raise _invalid(f"{VARIABLES[name]} is not set where the worker is to run, and {other}")
    return Secrets(**{name: found[name] for name in config.secret_names})


def read_secrets(path: Path) -> Secrets:
    """The secrets in a YAML file. Raises BatonError(INVALID), whose message shows no secret."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Secrets.model_validate(values if values is not None else {})
    except OSError as error:
        raise _invalid(f"cannot read secrets_file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise _invalid(f"secrets_file {path} is not valid YAML") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        problem = (
            f"unknown key {key}" if first["type"] == "extra_forbidden" else f"{key or 'it'}: {first['msg']}"
        )
        raise _invalid(f"secrets_file {path}: {problem}") from None


def _replace(worker: WorkerConfig, values: Mapping[str, str]) -> WorkerConfig:
    update: dict[str, object] = dict(values)
    if "redis_url" in update:
        assert worker.state is not None
        update["state"] = worker.state.model_copy(update={"redis_url": update.pop("redis_url")})
    return worker.model_copy(update=update)


def _invalid(message: str) -> BatonError:
    return BatonError(ErrorKind.INVALID, message)
