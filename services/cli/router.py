"""`baton router`: runs a router in this process; it finds its workers in Redis."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from baton.base.cluster_auth import prefix_secret
from services.cli.common import config_file, extras
from services.cli.common.become import become
from services.cli.common.config_file import invalid, read_journal_key, read_secret, read_shared_secret
from services.cli.up import settings
from services.cli.up.model_folder import DEMO, model_and_name
from services.common.config.files import RouterFile, RouterStateFile
from services.common.config.router import RouterConfig, check_public_access
from services.common.config.state import NO_STATE, StateConfig

_FLAGS = ("served_model_name", "auth", "router.", "state.", "cluster_secret_file", "tracing.", "log_level")


def add_flags(parser: argparse.ArgumentParser) -> None:
    config_file.add_flag(parser, "YAML file of settings, see below")
    parser.add_argument("--model", metavar="DIR", help=f"folder with tokenizer and config.json, or {DEMO}")
    settings.add_flags(parser, only=_FLAGS)
    parser.epilog = "Keys of FILE: " + ", ".join(config_file.keys_of(RouterFile)) + "."


def run(arguments: argparse.Namespace) -> int:
    """Replaces this process by `python -m services.router`, which reads its configuration from stdin."""
    extras.require("router")
    become("services.router", router_config(arguments, os.environ))


def router_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> RouterConfig:
    """The configuration from file, environment, flags and files of secrets.

    Raises `BatonError(INVALID)` with one line for the first error.
    """
    overrides: dict[str, object] = dict(settings.given_flags(arguments, environment))
    file = config_file.load(arguments.config, RouterFile, overrides)
    if file.model != DEMO and not Path(file.model).is_dir():
        raise invalid(f"model {file.model}: no such folder")
    check_public_access(file.router.host, file.auth)
    folder, name = model_and_name(file.model)
    cluster_secret = read_shared_secret(file.cluster_secret_file, "cluster_secret_file")
    hashing = file.prefix_secret_file
    return RouterConfig(
        **file.router.model_dump(),
        model=str(folder),
        served_model_name=file.served_model_name or name,
        state=_state(file.state),
        prefix_secret=read_shared_secret(hashing, "prefix_secret_file")
        if hashing
        else prefix_secret(cluster_secret),
        cluster_secret=cluster_secret,
        tls=file.tls.internal,
        public_tls=file.tls.public,
        auth=file.auth,
        require_tls=file.require_tls,
        tracing=file.tracing,
        drain_s=file.drain_s,
        log_level=file.log_level,
    )


def _state(file: RouterStateFile) -> StateConfig:
    if file.redis_url == NO_STATE:
        raise invalid(f"state.redis_url: a router finds its workers in Redis, so it cannot be {NO_STATE}")
    path = file.redis_url_file
    url = file.redis_url if path is None else read_secret(path, "state.redis_url_file")
    assert url is not None  # the file has one of both
    return StateConfig(
        redis_url=url,
        redis_url_file=path,
        namespace=file.namespace,
        journal_key=read_journal_key(file.journal_key_file) if file.journal_key_file else "",
    )
