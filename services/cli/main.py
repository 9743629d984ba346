"""The `baton` command: `up`, `demo`, `router`, `worker`, `worker-group`, `supervise`, `stop-workers`,
`ray-certificate`, `status`, `top`, `fetch-model`, `check`, `drain`, `pool`, `keys`, `audit`,
`warm-kernels`, `version`.

Exit codes: 0 success, 1 a failure at run time, 2 wrong arguments, configuration or model.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from baton.base.errors import BatonError, ErrorKind
from services.cli.common import extras
from services.cli.common.messages import discard, notify
from services.common.processes.child_process import ChildError

if TYPE_CHECKING:
    from services.common.config.settings import Settings

FAILED, REFUSED = 1, 2
_RUN_TIME = (ErrorKind.UNAVAILABLE, ErrorKind.INTERNAL, ErrorKind.DEADLINE)

Command = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, without the usage text; an unknown flag with the nearest one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 (as argparse)
        self.flags: list[str] = []
        super().__init__(*arguments, **options)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:  # noqa: ANN401
        self.flags += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **options)

    def refuse(self, unknown: str) -> NoReturn:
        """Exits because of an argument that it does not have."""
        near = difflib.get_close_matches(unknown.partition("=")[0], self.flags, 1, 0.7)
        hint = f", did you mean {near[0]}?" if near else ""
        self.error(f"unrecognized argument {unknown}{hint}")

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments, unknown = _parser(argv).parse_known_args(argv)
    if unknown:
        arguments.parser.refuse(unknown[0])
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


class Add(Protocol):
    """Adds a command and returns its parser, for flags."""

    def __call__(self, run: Command, summary: str) -> argparse.ArgumentParser: ...


def _parser(argv: Sequence[str] = ()) -> Parser:
    """The parser of `argv`: of its command alone, since modules of all commands take half a second to
    import, or of all where it names none."""
    parser = Parser(prog="baton", description="Serves large language models from prefill and decode workers.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)
    names = [name for name in argv[:1] if name in COMMANDS] or list(COMMANDS)
    for name in names:

        def add(run: Command, summary: str, name: str = name) -> argparse.ArgumentParser:
            # No abbreviations of flags: a later flag could make them ambiguous.
            added = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
            added.set_defaults(command=run, parser=added)
            return added

        COMMANDS[name](add)
    return parser


def _add_up(add: Add) -> None:
    from services.cli.up import settings

    summary = "start workers and a router; flags override BATON_* variables, which override FILE"
    settings.add_flags(add(_up, summary))


def _add_demo(add: Add) -> None:
    from services.cli.up import settings

    settings.add_flags(add(_demo, "start a cluster, stream a few prompts, print a summary"))


def _add_router(add: Add) -> None:
    from services.cli import router

    router.add_flags(add(router.run, "run one router, which finds its workers in Redis"))


def _add_worker(add: Add) -> None:
    from services.cli import worker

    worker.add_flags(add(worker.run, "run one worker, without supervision"))


def _add_group(add: Add) -> None:
    from services.cli import group

    summary = "run the workers of one container, one on each GPU, and restart them"
    group.add_flags(add(group.run, summary))


def _add_status(add: Add) -> None:
    from services.cli.status import command as status

    status.add_flags(add(status.run, "show whether a cluster serves, and the state of its workers"))


def _add_top(add: Add) -> None:
    from services.cli.status import top_command as top

    top.add_flags(add(top.run, "show the status, refreshed every second until q"))


def _add_fetch_model(add: Add) -> None:
    from services.cli.fetch_model import command as fetch_model

    summary = "download a model, once for all processes that share a volume"
    fetch_model.add_flags(add(fetch_model.run, summary))


def _add_check(add: Add) -> None:
    from services.cli.check import command as check
    from services.cli.check.target import add_flags

    add_flags(add(check.run, "check that a router serves: health, models, two generations"))


def _add_drain(add: Add) -> None:
    from services.cli import drain

    drain.add_flags(add(drain.run, "stop new work for one worker, or for the router"))


def _add_pool(add: Add) -> None:
    from services.cli import pool

    pool.add_flags(add(pool.run, "list the pools of workers, or switch to another one"), Parser)


def _add_keys(add: Add) -> None:
    from services.cli import keys

    keys.add_flags(add(keys.run, "add, list and revoke API keys in Redis"), Parser)


def _add_audit(add: Add) -> None:
    from services.cli import audit

    audit.add_flags(add(audit.run, "verify a router's audit log"), Parser)


def _add_supervise(add: Add) -> None:
    from services.cli import supervise

    supervise.add_flags(add(supervise.run, "run the workers of an existing Ray cluster"))


def _add_stop_workers(add: Add) -> None:
    from services.cli import stop_workers

    summary = "drain the workers of this container, before Ray ends them"
    stop_workers.add_flags(add(stop_workers.run, summary))


def _add_ray_certificate(add: Add) -> None:
    from services.cli import ray_certificate

    summary = "make the certificate of a Ray node for its address"
    ray_certificate.add_flags(add(ray_certificate.run, summary))


def _add_warm_kernels(add: Add) -> None:
    from services.cli import warm_kernels

    summary = "compile the kernels of workers into a folder, for their image"
    warm_kernels.add_flags(add(warm_kernels.run, summary))


def _add_version(add: Add) -> None:
    add(_version, "print the version")


# In the order of `baton --help`. Each imports its command only when it is to be parsed.
COMMANDS: Mapping[str, Callable[[Add], None]] = {
    "up": _add_up,
    "demo": _add_demo,
    "router": _add_router,
    "worker": _add_worker,
    "worker-group": _add_group,
    "status": _add_status,
    "top": _add_top,
    "fetch-model": _add_fetch_model,
    "check": _add_check,
    "drain": _add_drain,
    "pool": _add_pool,
    "keys": _add_keys,
    "audit": _add_audit,
    "supervise": _add_supervise,
    "stop-workers": _add_stop_workers,
    "ray-certificate": _add_ray_certificate,
    "warm-kernels": _add_warm_kernels,
    "version": _add_version,
}


def _up(arguments: argparse.Namespace) -> int:
    from services.cli.up.command import up

    config, model = _cluster(arguments)
    return asyncio.run(up(config, model))


def _demo(arguments: argparse.Namespace) -> int:
    from services.cli.demo import command as demo

    config, model = _cluster(arguments, demo.DEFAULTS)
    return asyncio.run(demo.demo(config, model))


def _cluster(
    arguments: argparse.Namespace, defaults: Mapping[str, str] | None = None
) -> tuple[Settings, Path]:
    """The configuration and the model folder. Raises BatonError where extras are missing or the settings are
    wrong."""
    from services.cli.up import settings
    from services.cli.up.model_folder import with_model

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
