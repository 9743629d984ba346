"""Imports modules, and asks every command for its help, in the Python that runs this file.

    python check_install.py [-MODULE...] MODULE...

Every module of a package of Baton's is imported, except those that are named with a dash. Prints a line for
each failure. Needs nothing but Baton, so that it runs where nothing else is installed.
"""

from __future__ import annotations

import importlib
import io
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout

OURS = ("baton", "kvtransfer", "loadgen", "services")


def import_failures(modules: Sequence[str]) -> Iterator[str]:
    """Names of these modules that cannot be imported, and of modules in ours, without those named with a
    dash."""
    left_out = {name.removeprefix("-") for name in modules if name.startswith("-")}
    for first in (name for name in modules if not name.startswith("-")):
        names = [first]
        while names:
            name = names.pop()
            if name in left_out:
                continue
            try:
                module = importlib.import_module(name)
            except Exception as error:
                yield f"import {name}: {type(error).__name__}: {error}"
                continue
            inside = getattr(module, "__path__", ()) if first.partition(".")[0] in OURS else ()
            names += [f"{name}.{found.name}" for found in pkgutil.iter_modules(inside)]


def help_failures() -> Iterator[str]:
    """Faults of `--help` of `baton`, `loadgen` and all their commands."""
    from loadgen import cli as loadgen
    from services.cli import commands
    from services.cli.main import main as baton

    for command in ("", *commands.GROUPS, *commands.COMMANDS):
        yield from _help_failures(baton, "baton", command.split())
    for command in ("", *loadgen.COMMANDS):
        yield from _help_failures(loadgen.main, "loadgen", command.split())


def _help_failures(main: Callable[[list[str]], int], name: str, command: list[str]) -> Iterator[str]:
    out, err = io.StringIO(), io.StringIO()
    code: object = None
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main([*command, "--help"])
    except SystemExit as ended:
        code = ended.code
    except Exception as error:
        code = f"{type(error).__name__}: {error}"
    if code != 0 or "usage:" not in out.getvalue():
        yield f"{' '.join([name, *command])} --help: {code} {err.getvalue()}"


if __name__ == "__main__":
    failures = [*import_failures(sys.argv[1:]), *help_failures()]
    print("\n".join(failures), end="\n" if failures else "")
    sys.exit(bool(failures))
