"""Structured logs on stderr, one line for each event; stdout is for the protocol with the parent process.

A line may have ids, counts, addresses and kinds of error, never a prompt, an output or a token. An exception
is written as its traceback and type: its text may quote what it failed at.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any

from baton.base.structured_logs import structlog


class _Stderr:
    """Stderr, one write for each line. A closed stderr is ignored: logging must not fail a process."""

    def write(self, line: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(line)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


class _Forward(logging.Handler):
    """Forwards records of the standard library's loggers, so that all lines have one format."""

    def emit(self, record: logging.LogRecord) -> None:
        fields = {name: value for name, value in record.__dict__.items() if name not in _RECORD_FIELDS}
        level = max((known for known in _LEVELS if known <= record.levelno), default=logging.DEBUG)
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        message = record.getMessage()
        if record.name == "asyncio":  # its further lines have reprs of tasks, and in these of exceptions
            message = message.partition("\n")[0]
        get_log(record.name).log(level, message, **fields)


_RECORD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "event", "part"}
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
# Causes of an exception that are written.
_MOST_CAUSES = 8
# Packages whose loggers write from the configured level on; those of libraries write from WARNING on.
_PACKAGES = ("baton", "kvtransfer", "services")


def configure_logs(level: str, *, exception_texts: bool = False, **bound: str) -> None:
    """Writes all logs of this process, structlog's and the standard library's, to stderr from `level` up,
    with the fields `bound` on each line. `exception_texts`: for a process to which no text of a client
    comes."""
    threshold = logging.getLevelNamesMapping()[level.upper()]

    def add_bound(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Adds the bound fields; context variables are not inherited by other threads."""
        for name, value in bound.items():
            event.setdefault(name, value)
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add_bound,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info
            if exception_texts
            else structlog.processors.ExceptionRenderer(_without_text),
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(_Stderr()),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(**bound)
    logging.basicConfig(level=max(threshold, logging.WARNING), handlers=[_Forward()], force=True)
    for name in _PACKAGES:
        logging.getLogger(name).setLevel(threshold)
    if not exception_texts:
        _log_uncaught()


def _log_uncaught() -> None:
    """Logs exceptions that Python would write to stderr itself, with their texts."""
    log = get_log("python")

    def of_thread(args: threading.ExceptHookArgs) -> None:
        log.error("thread_failed", exc_info=args.exc_value)

    def of_process(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        log.error("process_failed", exc_info=error)

    def ignored(args: sys.UnraisableHookArgs) -> None:
        log.error("exception_ignored", exc_info=args.exc_value)

    threading.excepthook, sys.excepthook, sys.unraisablehook = of_thread, of_process, ignored


def _without_text(exc_info: tuple[type[BaseException], BaseException, TracebackType | None]) -> str:
    """The tracebacks of an exception and of its causes, each with its type."""
    parts: list[str] = []
    error: BaseException | None = exc_info[1]
    while error is not None and len(parts) < _MOST_CAUSES:
        lines = ["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)]
        parts.insert(0, "".join([*lines, _type_of(error)]))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n\nThis led to:\n\n".join(parts)


def _type_of(error: BaseException) -> str:
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    if isinstance(error, OSError) and error.strerror:
        return f"{name}: {error.strerror}"
    if isinstance(error, BaseExceptionGroup):
        return f"{name}: {', '.join(map(_type_of, error.exceptions))}"
    return name


def get_log(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose lines have `part=name`."""
    log: structlog.stdlib.BoundLogger = structlog.get_logger(part=name)
    return log
