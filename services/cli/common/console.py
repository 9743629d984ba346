"""The console that tables of commands are printed to."""

from __future__ import annotations

import os

from rich.console import Console

# Width of output to a file or a pipe: more than any table takes, so that no name in it is cut or broken.
_PIPE_WIDTH = 1000


def console() -> Console:
    """A console for the terminal; without one, lines are as long as need be."""
    plain = Console(highlight=False)
    if plain.is_terminal or "COLUMNS" in os.environ:
        return plain
    return Console(highlight=False, width=_PIPE_WIDTH)
