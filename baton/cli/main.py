"""The `baton` command: `up`, `demo`, `router`, `worker`, `worker-group`, `supervise`, `stop-workers`,
`ray-certificate`, `status`, `top`, `fetch-model`, `check`, `drain`, `pool`, `keys`, `audit`,
`warm-kernels`, `version`.

Exit codes: 0 success, 1 a failure at run time, 2 wrong arguments, configuration or model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from baton.cli import (
    audit,
    drain,
    group,
    keys,
    pool,
    ray_certificate,
    router,
    stop_workers,
    supervise,
    warm_kernels,
    worker,
)
from baton.cli.check import command as check
from baton.cli.common import extras
from baton.cli.common.messages import discard, notify
from baton.cli.demo import command as demo
from baton.cli.fetch_model import command as fetch_model
from baton.cli.status import command as status
from baton.cli.status import top_command as top
from baton.cli.up import settings
from baton.cli.up.command import up
from baton.cli.up.model_folder import with_model
from baton.errors import BatonError, ErrorKind
from services.common.config.up import UpConfig
from services.common.processes.child_process import ChildError

FAILED, REFUSED = 1, 2
_RUN_TIME = (ErrorKind.UNAVAILABLE, ErrorKind.INTERNAL, ErrorKind.DEADLINE)

Command = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    # gRPC would log connections that close at a stop.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        return command(arguments)
    except BatonError as error:
        notify(f"error: {error.message}")
        return FAILED if error.kind in _RUN_TIME else REFUSED
    except ChildError as error:
        notify(f"error: {error}")
        return FAILED
    except BrokenPipeError:
        discard(sys.stdout)
        return FAILED
    except KeyboardInterrupt:
        return 130


def _parser() -> Parser:
    parser = Parser(prog="baton", description="Serves large language models from prefill and decode workers.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)

    def add(name: str, run: Command, summary: str) -> argparse.ArgumentParser:
        # No abbreviations of flags: a later flag could make them ambiguous.
        added = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        added.set_defaults(command=run)
        return added

    settings.add_flags(
        add(
            "up",
            _up,
            "start workers and a router; flags override BATON_* variables, which override FILE",
        )
    )
    settings.add_flags(add("demo", _demo, "start a cluster, stream a few prompts, print a summary"))
    router.add_flags(add("router", router.run, "run one router, which finds its workers in Redis"))
    worker.add_flags(add("worker", worker.run, "run one worker, without supervision"))
    group.add_flags(
        add("worker-group", group.run, "run the workers of one container, one on each GPU, and restart them")
    )
    status.add_flags(add("status", status.run, "show whether a cluster serves, and the state of its workers"))
    top.add_flags(add("top", top.run, "show the status, refreshed every second until q"))
    fetch_model.add_flags(
        add("fetch-model", fetch_model.run, "download a model, once for all processes that share a volume")
    )
    check.add_flags(add("check", check.run, "check that a router serves: health, models, two generations"))
    drain.add_flags(add("drain", drain.run, "stop new work for one worker, or for the router"))
    pool.add_flags(add("pool", pool.run, "list the pools of workers, or switch to another one"), Parser)
    keys.add_flags(add("keys", keys.run, "add, list and revoke API keys in Redis"), Parser)
    audit.add_flags(add("audit", audit.run, "verify a router's audit log"), Parser)
    supervise.add_flags(add("supervise", supervise.run, "run the workers of an existing Ray cluster"))
    stop_workers.add_flags(
        add("stop-workers", stop_workers.run, "drain the workers of this container, before Ray ends them")
    )
    ray_certificate.add_flags(
        add("ray-certificate", ray_certificate.run, "make the certificate of a Ray node for its address")
    )
    warm_kernels.add_flags(
        add("warm-kernels", warm_kernels.run, "compile the kernels of workers into a folder, for their image")
    )
    add("version", _version, "print the version")
    return parser


def _up(arguments: argparse.Namespace) -> int:
    config, model = _cluster(arguments)
    return asyncio.run(up(config, model))


def _demo(arguments: argparse.Namespace) -> int:
    config, model = _cluster(arguments, demo.DEFAULTS)
    return asyncio.run(demo.demo(config, model))


def _cluster(
    arguments: argparse.Namespace, defaults: Mapping[str, str] | None = None
) -> tuple[UpConfig, Path]:
    """The configuration and the model folder. Raises BatonError where extras are missing or the settings are
    wrong."""
    extras.require("router", "worker")
    config = settings.load(arguments, os.environ, defaults)
    if config.supervision.ray_address != "none":
        extras.require("cluster", hint=" (or run without Ray: --ray-address none)")
    return with_model(config)


def _version(_: argparse.Namespace) -> int:
    try:
        print(f"baton {version(extras.DISTRIBUTION)}")
    except PackageNotFoundError:
        print("baton (not installed)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
