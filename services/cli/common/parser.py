"""The parser of a command's flags, whose errors are one line each."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from services.cli.common.messages import one_line, write_line

REFUSED = 2
# A flag at the start of its line in a help text.
_FLAG = re.compile(r"^  (?:-\w[^,\n]*, )?(--[\w-]+)", re.MULTILINE)


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, without the usage text, and an unknown flag with the nearest
    one. Flags cannot be abbreviated: a later flag could make them ambiguous."""

    def __init__(self, program: str, summary: str) -> None:
        super().__init__(prog=program, description=summary, allow_abbrev=False)
        self._given: Sequence[str] = ()

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses the arguments behind the command's name. Raises SystemExit after `--help`, and with code 2
        where one is wrong."""
        self._given = arguments
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            self.error(f"unrecognized argument {unknown[0]}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Exits because of an unknown flag where there is one: it may be the reason why another is
        missing."""
        known = ["--", *_FLAG.findall(self.format_help())]
        for flag in (one.partition("=")[0] for one in self._given):
            if flag.startswith("--") and flag not in known:
                refuse(self.prog, f"unrecognized argument {flag}{nearest(flag, known)}")
        refuse(self.prog, message)


def refuse(program: str, message: str) -> NoReturn:
    """Exits with code 2 and one line, which says whose help to read."""
    write_line(sys.stderr, one_line(f"{program}: error: {message} (see {program} --help)"))
    sys.exit(REFUSED)


def nearest(name: str, known: Mapping[str, str] | Sequence[str]) -> str:
    """Returns ", did you mean …?" if a known name is near to one that is not, else nothing. For a mapping,
    the value is shown."""
    found = difflib.get_close_matches(name, list(known), 1, 0.7)
    if not found:
        return ""
    shown = known[found[0]] if isinstance(known, Mapping) else found[0]
    return f", did you mean {shown}?"
