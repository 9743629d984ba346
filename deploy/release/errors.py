"""Errors of a release that its maker sees in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable


class ReleaseError(Exception):
    """A release that cannot be made: its version is wrong, or a program is missing."""


def exit_code(work: Callable[[], None]) -> int:
    """Runs `work`: 0, or 2 after a ReleaseError, which is printed in one line on stderr."""
    try:
        work()
    except ReleaseError as error:
        print(f"release: error: {error}", file=sys.stderr)
        return 2
    return 0
