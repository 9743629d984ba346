"""What a command tells its user on stderr: one line a fact."""

from __future__ import annotations

import contextlib
import sys


def say(message: str) -> None:
    """Writes one line to stderr. Nobody may be reading it, and that must stop nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(f"baton: {message}", file=sys.stderr, flush=True)
