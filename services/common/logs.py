"""Logs go to stderr, one structured line an event; stdout belongs to the parent protocol.

A line carries ids, counts, addresses and kinds of error, never a prompt, an output or a token.
"""

from __future__ import annotations

import contextlib
import logging
import sys

import structlog


class _Stderr:
    """Where lines go, each in one piece. Its reader may be gone, and that must stop nothing."""

    def write(self, line: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(line)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure_logs(level: str, **bound: str) -> None:
    """Sends every log of this process to stderr from `level` up, with `bound` on each line."""
    threshold = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(_Stderr()),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(**bound)
    logging.basicConfig(level=max(threshold, logging.WARNING), stream=sys.stderr)


def get_log(name: str) -> structlog.stdlib.BoundLogger:
    """A logger that says which part of Baton speaks."""
    log: structlog.stdlib.BoundLogger = structlog.get_logger(part=name)
    return log
