"""Output of a command: messages on stderr, results on stdout; a closed pipe is no error."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def notify(message: str) -> None:
    """Writes one line to stderr."""
    write_line(sys.stderr, one_line(f"baton: {message}"))


def one_line(message: str) -> str:
    """Escapes line breaks: a message may repeat a value that has some."""
    return message.replace("\n", "\\n")


def write_line(stream: TextIO, line: str) -> None:
    """Writes one line in one call and flushes it. Where the pipe is closed, this and later lines are
    dropped."""
    try:
        stream.write(line + "\n")
        stream.flush()
    except BrokenPipeError:
        discard(stream)


def discard(stream: TextIO) -> None:
    """Redirects a stream to /dev/null after a broken pipe, so that flushing it at exit does not fail."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())


def warn(message: str) -> None:
    """Writes a warning to stderr, in one line."""
    notify(f"warning: {message}")
