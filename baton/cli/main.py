"""The `baton` command: `up`, `demo`, `worker`, `status`, `top`, `drain`, `pool`, `version`.

Exit codes: 0 it did what was asked, 1 something failed on the way, 2 it was asked for something impossible.
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

from baton.cli import drain, pool, worker
from baton.cli.common import extras
from baton.cli.common.messages import give_up, say
from baton.cli.demo import command as demo
from baton.cli.status import command as status
from baton.cli.status import top_command as top
from baton.cli.up import settings
from baton.cli.up.command import up
from baton.cli.up.model_folder import with_model
from baton.errors import BatonError, ErrorKind
from services.common.config.up import UpConfig
from services.common.processes.child_process import ChildError

FAILED, REFUSED = 1, 2
_ON_THE_WAY = (ErrorKind.UNAVAILABLE, ErrorKind.INTERNAL, ErrorKind.DEADLINE)

Command = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Mistakes cost one line, not a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    # gRPC's own notes, of connections that close at a stop, are no news to an operator.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        return command(arguments)
    except BatonError as error:
        say(f"error: {error.message}")
        return FAILED if error.kind in _ON_THE_WAY else REFUSED
    except ChildError as error:
        say(f"error: {error}")
        return FAILED
    except BrokenPipeError:
        give_up(sys.stdout)
        return FAILED
    except KeyboardInterrupt:
        return 130


def _parser() -> Parser:
    parser = Parser(prog="baton", description="Serves large language models from prefill and decode workers.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)

    def add(name: str, run: Command, summary: str) -> argparse.ArgumentParser:
        # No abbreviations: they would stop working with a later flag.
        added = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        added.set_defaults(command=run)
        return added

    settings.add_flags(
        add("up", _up, "start workers and router on this machine; flags over BATON_* over FILE")
    )
    settings.add_flags(add("demo", _demo, "the same, with a few streamed prompts and a summary"))
    worker.add_flags(add("worker", worker.run, "run one worker, which nobody supervises"))
    status.add_flags(add("status", status.run, "whether a cluster serves, and what its workers hold"))
    top.add_flags(add("top", top.run, "the same, redrawn every second until q"))
    drain.add_flags(add("drain", drain.run, "stop new work for one worker, or for the router"))
    pool.add_flags(add("pool", pool.run, "list pools of workers, or switch to another one"), Parser)
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
    """What to run, once all that it needs is known to be installed."""
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
