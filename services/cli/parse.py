"""Finds the command that a command line names, and parses its flags; prints the help of all commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from baton.base.utf8 import is_utf8
from services.cli.commands import COMMANDS, GROUPS, SECTIONS, Command
from services.cli.common import extras
from services.cli.common.messages import write_line
from services.cli.common.parser import Parser, nearest, refuse
from services.cli.old_spellings import NEW, current

_HELP = ("-h", "--help")
_VERSION = "--version"
_BEFORE = (
    "usage: baton COMMAND [FLAGS]",
    "",
    "Serves large language models from prefill and decode workers.",
)
_AFTER = "`baton COMMAND --help` lists flags, `baton --version` prints the version."


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of a command line, and `command`, the function that takes them.

    Raises SystemExit after `--help` and `--version`, and with code 2 where an argument is wrong.
    """
    if not all(map(is_utf8, argv)):
        refuse("baton", "an argument is not UTF-8")
    first, *rest = current(argv) or [""]
    if not first or first.startswith("-"):
        _without_a_command(first)
    inner = subcommands(first)
    if rest and rest[0] in inner:
        return parser_of(f"{first} {rest[0]}").parse(rest[1:])
    if first in COMMANDS and not (inner and rest and not rest[0].startswith("-")):
        return parser_of(first).parse(rest)
    if inner:
        _without_a_subcommand(first, inner, rest[0] if rest else "")
    refuse("baton", f"unknown command {first}{_nearest_command(first)}")


def parser_of(name: str) -> Parser:
    """The parser of one command. It imports the modules of that command alone: those of all take half a
    second."""
    command = COMMANDS[name]
    parser = Parser(f"baton {name}", command.summary)
    parser.set_defaults(command=command.load(parser))
    return parser


def subcommands(group: str) -> dict[str, Command]:
    """The commands whose first word is `group`, by their second word."""
    return {name.partition(" ")[2]: one for name, one in COMMANDS.items() if name.startswith(f"{group} ")}


def overview() -> str:
    """The help of `baton` itself: each command in a line, by task."""
    lines: list[str] = []
    width = max(len(name) for names in SECTIONS.values() for name in names)
    for title, names in SECTIONS.items():
        summaries = {name: GROUPS.get(name) or COMMANDS[name].summary for name in names}
        lines += ["", f"{title}:", *_list(summaries, width)]
    return "\n".join([*_BEFORE, *lines, "", _AFTER])


def _list(summaries: Mapping[str, str], width: int) -> list[str]:
    return [f"  {name:<{width}}  {summary}" for name, summary in summaries.items()]


def _without_a_command(flag: str) -> NoReturn:
    """Ends a command line that begins with a flag, or is empty."""
    if flag in _HELP:
        _print(overview())
    if flag == _VERSION:
        _print(_installed_version())
    if flag:
        refuse("baton", f"unrecognized argument {flag}{nearest(flag, (*_HELP, _VERSION))}")
    refuse("baton", "a command is missing")


def _without_a_subcommand(group: str, inner: Mapping[str, Command], word: str) -> NoReturn:
    """Ends a command line that names a group and none of its commands."""
    program = f"baton {group}"
    if word in _HELP:
        summaries = {name: one.summary for name, one in inner.items()}
        lines = [f"usage: {program} COMMAND [FLAGS]", "", GROUPS[group], ""]
        _print("\n".join(lines + _list(summaries, max(map(len, summaries)))))
    if not word or word.startswith("-"):
        refuse(program, f"a command is missing: {', '.join(inner)}")
    refuse(program, f"unknown command {word}{nearest(word, tuple(inner))}")


def _nearest_command(word: str) -> str:
    """A hint at the command whose first, last or old name is near to a word that names none."""
    known = {name.rpartition(" ")[2]: name for name in COMMANDS}
    known |= {old: " ".join(new) for old, new in NEW.items()}
    return nearest(word, {**known, **{name: name for name in GROUPS}, "help": "--help"})


def _print(text: str) -> NoReturn:
    write_line(sys.stdout, text)
    sys.exit(0)


def _installed_version() -> str:
    try:
        return f"baton {version(extras.DISTRIBUTION)}"
    except PackageNotFoundError:
        return "baton (not installed)"
