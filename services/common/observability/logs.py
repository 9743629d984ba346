"""Logs go to stderr, one structured line an event; stdout belongs to the parent protocol.

A line carries ids, counts, addresses and kinds of error, never a prompt, an output or a token.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog


class _Stderr:
    """Where lines go, each in one piece. Its reader may be gone, and that must stop nothing."""

    def write(self, line: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(line)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


class _Forward(logging.Handler):
    """Passes records of the standard library's loggers on, so that every line has the one format."""

    def emit(self, record: logging.LogRecord) -> None:
        fields = {name: value for name, value in record.__dict__.items() if name not in _RECORD_FIELDS}
        level = max((known for known in _LEVELS if known <= record.levelno), default=logging.DEBUG)
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        get_log(record.name).log(level, record.getMessage(), **fields)


_RECORD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "event", "part"}
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
# Whose loggers write from the configured level on; those of libraries from WARNING on.
_OURS = ("baton", "kvtransfer", "services")


def configure_logs(level: str, **bound: str) -> None:
    """Sends every log of this process, structlog's and the standard library's, to stderr from `level` up,
    with `bound` on each line."""
    threshold = logging.getLevelNamesMapping()[level.upper()]

    def add_bound(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Context variables would do for the main thread alone: others begin with none."""
        for name, value in bound.items():
            event.setdefault(name, value)
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add_bound,
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
    logging.basicConfig(level=max(threshold, logging.WARNING), handlers=[_Forward()], force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(threshold)


def get_log(name: str) -> structlog.stdlib.BoundLogger:
    """A logger that says which part of Baton speaks."""
    log: structlog.stdlib.BoundLogger = structlog.get_logger(part=name)
    return log
