"""What a command tells its user: facts on stderr, results on stdout, and nobody has to read either."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def say(message: str) -> None:
    """Writes one line to stderr."""
    write_line(sys.stderr, f"baton: {message}")


def write_line(stream: TextIO, line: str) -> None:
    """Writes one line, in one piece and at once. Where the reader is gone, it and all later ones are lost."""
    try:
        stream.write(line + "\n")
        stream.flush()
    except BrokenPipeError:
        give_up(stream)


def give_up(stream: TextIO) -> None:
    """After a broken pipe: what is still buffered must not fail once more at exit."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
