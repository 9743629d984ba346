"""The `loadgen` command and its parser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from loadgen.common.errors import LoadgenError

# Each command, a module of `loadgen.commands`, and what its line of the help says.
COMMANDS = {
    "run": "send one load to a target",
    "search": "find the highest arrival rate that meets the limits",
    "sweep": "measure several rates",
    "compare": "compare runs or searches, with intervals",
    "report": "generate the reports of a run, search or sweep again",
    "trace": "describe a recorded load; convert it to Mooncake's format",
    "size": "compute how many prefill and decode workers a load needs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 2 after an error in the arguments, 130 after Ctrl-C."""
    given = sys.argv[1:] if argv is None else argv
    arguments = parser(*given[:1]).parse_args(given)
    try:
        code: int = arguments.main(arguments)
        return code
    except LoadgenError as error:
        print(f"loadgen: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser(*names: str) -> argparse.ArgumentParser:
    """The parser of all commands, of which those of `names` know their flags. It imports the modules of these
    alone: those of all take a third of a second."""
    made = argparse.ArgumentParser(
        prog="loadgen", description="Measures a streamed language model under load, and finds its goodput."
    )
    commands = made.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for name, summary in COMMANDS.items():
        inner = commands.add_parser(name, help=summary)
        if name in names:
            module = import_module(f"loadgen.commands.{name}")
            inner.description = module.DESCRIPTION
            inner.set_defaults(main=module.main)
            module.add(inner)
    return made
