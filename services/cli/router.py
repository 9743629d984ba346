"""`baton router`: runs a router in this process; it finds its workers in Redis."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from services.cli.common import extras, process_configs
from services.cli.common.become import become
from services.cli.common.messages import warn
from services.cli.up.model_folder import model_of
from services.common.config.router import RouterConfig, check_public_access
from services.common.config.settings_tree import reader
from services.common.config.settings_tree.reader import invalid
from services.common.config.settings_tree.secret_files import read_journal_key
from services.common.config.settings_tree.views import ROUTER
from services.common.config.state import NO_STATE, StateConfig


def add_flags(parser: argparse.ArgumentParser) -> None:
    reader.add_flags(parser, ROUTER)


def run(arguments: argparse.Namespace) -> int:
    """Replaces this process by `python -m services.router`, which reads its configuration from stdin."""
    extras.require("router")
    become("services.router", router_config(arguments, os.environ))


def router_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> RouterConfig:
    """The configuration from file, environment, flags and files of secrets.

    Raises `BatonError(INVALID)` with one line for the first error.
    """
    settings = reader.read(ROUTER, arguments, environment, warn=warn)
    folder, name = model_of(settings)
    check_public_access(settings.router.host, settings.auth)
    return process_configs.router_config(settings, folder, name, _state(settings.state))


def _state(state: StateConfig) -> StateConfig:
    if state.redis_url == NO_STATE:
        raise invalid(f"state.redis_url: a router finds its workers in Redis, so it cannot be {NO_STATE}")
    key = state.journal_key_file
    return state if key is None else state.model_copy(update={"journal_key": read_journal_key(key)})
