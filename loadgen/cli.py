"""The `loadgen` command and its parser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from loadgen.commands import compare, report, run, search, size, sweep, trace
from loadgen.common.errors import LoadgenError

COMMANDS = {
    "run": run,
    "search": search,
    "sweep": sweep,
    "compare": compare,
    "report": report,
    "trace": trace,
    "size": size,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 2 after an error in the arguments, 130 after Ctrl-C."""
    arguments = parser().parse_args(argv)
    try:
        code: int = COMMANDS[arguments.command].main(arguments)
        return code
    except LoadgenError as error:
        print(f"loadgen: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    made = argparse.ArgumentParser(
        prog="loadgen", description="Measures a streamed language model under load, and finds its goodput."
    )
    commands = made.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        command.add(commands.add_parser(name, help=command.HELP, description=command.DESCRIPTION))
    return made
