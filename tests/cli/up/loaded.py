"""Settings of `baton up` and `baton worker`, read from flags and an environment as the commands read them."""

from __future__ import annotations

import argparse

from services.cli import worker as worker_command
from services.cli.up import settings
from services.common.config.settings_tree.settings import Settings
from services.common.config.worker import WorkerConfig


def load(*flags: str, **environment: str) -> Settings:
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    return settings.load(parser.parse_args(flags), environment)


def worker(*flags: str, **environment: str) -> WorkerConfig:
    parser = argparse.ArgumentParser()
    worker_command.add_flags(parser)
    arguments = parser.parse_args(["--role", "both", "--model", "m", *flags])
    return worker_command.worker_config(arguments, environment)
