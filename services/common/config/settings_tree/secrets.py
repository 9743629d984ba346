"""The secrets of a cluster, separate from the rest of its configuration.

On Ray, configurations are arguments of actors. Ray's control store keeps those in memory, and in a database
if one is configured, so secrets are not among them: each machine reads them from a file or its environment.

    public = without_secrets(worker)                            at `baton up`, for Ray
    with_secrets(public, find_secrets(config, os.environ))      where the worker starts
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from baton.base.cluster_auth import prefix_secret
from baton.base.errors import BatonError, ErrorKind
from services.common.config.cluster import ClusterConfig
from services.common.config.settings_tree.reader import SECRETS, read_secrets
from services.common.config.settings_tree.secret_files import read_secret_file, read_shared_secret
from services.common.config.worker import WorkerConfig

VARIABLES: Mapping[str, str] = {name: f"BATON_{name.upper()}" for name in SECRETS}
"""The environment variable of each secret."""


def secrets_of(worker: WorkerConfig) -> dict[str, str]:
    """The secrets in a worker's configuration, by name."""
    url = (worker.state.redis_url if worker.state else None) or ""
    found = {
        # A URL without credentials is no secret, and workers on other machines need it.
        "redis_url": url if "@" in url or "?" in url else "",
        "prefix_secret": worker.prefix_secret,
        "cluster_secret": worker.cluster_secret,
    }
    return {name: secret for name, secret in found.items() if secret}


def without_secrets(worker: WorkerConfig) -> WorkerConfig:
    """The configuration with its secrets empty."""
    return with_secrets(worker, dict.fromkeys(secrets_of(worker), ""))


def with_secrets(worker: WorkerConfig, secrets: Mapping[str, str]) -> WorkerConfig:
    """The configuration that `without_secrets` returned, with its secrets again."""
    update: dict[str, object] = dict(secrets)
    if "redis_url" in update:
        assert worker.state is not None
        update["state"] = worker.state.model_copy(update={"redis_url": update.pop("redis_url")})
    return worker.model_copy(update=update)


def read_secret_files(files: Mapping[str, Path]) -> dict[str, str]:
    """The secrets of a cluster whose configuration names a file for each, by name.

    Raises BatonError(INVALID), whose message has the path and no secret.
    """
    secret = read_shared_secret(files["cluster_secret"], "cluster_secret_file")
    found = {"cluster_secret": secret, "prefix_secret": prefix_secret(secret)}
    if own := files.get("prefix_secret"):
        found["prefix_secret"] = read_secret_file(own, "prefix_secret_file")
    if url := files.get("redis_url"):
        found["redis_url"] = read_secret_file(url, "state.redis_url_file")
    return found


def find_secrets(config: ClusterConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """The secrets that `config` names, as found on this machine: a file for each, or `config.secrets_file`
    before `environment`.

    Raises BatonError(INVALID) where one is missing.
    """
    if config.secret_files is not None:
        return read_secret_files(config.secret_files)
    if not config.secret_names:
        return {}
    file = config.secrets_file
    found = {name: environment[variable] for name, variable in VARIABLES.items() if variable in environment}
    found |= read_secrets(file) if file is not None else {}
    for name in config.secret_names:
        if not found.get(name):
            other = f"secrets_file {file} has no {name}" if file is not None else "no secrets_file is named"
            message = f"{VARIABLES[name]} is not set where the worker is to run, and {other}"
            raise BatonError(ErrorKind.INVALID, message)
    return {name: found[name] for name in config.secret_names}
