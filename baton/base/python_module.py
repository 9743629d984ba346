"""The command of a Python process of the project."""

from __future__ import annotations

import sys

# The same for processes that others start: variables of their environment.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def python_module(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module in a process of its own, with this process's interpreter.

    Without `-P` Python would look for every module in the current folder first: a `queue.py` there would be
    run in place of the standard library's.
    """
    return (sys.executable, "-P", "-m", module, *arguments)
