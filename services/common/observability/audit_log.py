"""Writes the audit log: who did what and with which outcome, never content."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import threading
import time
from pathlib import Path

from baton.base.errors import BatonError, ErrorKind
from services.common.observability.audit_chain import LONGEST_LINE, START, AuditRecord, Link, line_of, link_of
from services.common.observability.logs import get_log

# Records that wait to be written; more are dropped and counted.
MOST_WAITING = 10_000
# Failed authentications a second, of which strangers can cause as many as they like; more are dropped too.
MOST_FAILURES_PER_S = 100
LOOK_S = 1.0
_CLOSE_S = 2.0

_log = get_log("audit")


class AuditLog:
    """An audit log that records nothing; `AuditFile` records. Counts are since the start."""

    lines = 0
    dropped = 0

    def record(self, record: AuditRecord) -> None:
        """Takes a record without waiting. Thread-safe."""

    def close(self) -> None:
        """Writes what is waiting, within a bounded time."""


class AuditFile(AuditLog):
    """Appends to a file in a thread of its own. The file is this process's alone. It may be renamed
    meanwhile; the chain goes on in a new one."""

    def __init__(self, path: Path, most_waiting: int = MOST_WAITING, look_s: float = LOOK_S) -> None:
        """Raises BatonError(INVALID) where the file cannot be written, or another process writes it."""
        self._path = path
        self._look_s = look_s
        self._queue: queue.Queue[tuple[float, AuditRecord] | None] = queue.Queue(most_waiting)
        self._count_lock = threading.Lock()
        self._second, self._failures = 0, 0
        self._unreported = 0
        self._failed = False
        try:
            self._file, self._last = self._open(START)
        except OSError as error:
            reason = "another process writes it" if isinstance(error, BlockingIOError) else error.strerror
            raise BatonError(ErrorKind.INVALID, f"audit_log {path}: {reason}") from None
        self._thread = threading.Thread(target=self._run, name="audit-log", daemon=True)
        self._thread.start()

    def record(self, record: AuditRecord) -> None:
        now = time.time()
        if record.event == "authentication" and not self._admits_failure(int(now)):
            return self._drop()
        try:
            self._queue.put_nowait((now, record))
        except queue.Full:
            self._drop()

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)

    def _admits_failure(self, second: int) -> bool:
        with self._count_lock:
            if second != self._second:
                self._second, self._failures = second, 0
            self._failures += 1
            return self._failures <= MOST_FAILURES_PER_S

    def _drop(self) -> None:
        with self._count_lock:
            self.dropped += 1
            self._unreported += 1

    def _open(self, last: Link) -> tuple[int, Link]:
        """Opens the file; returns it and the link that its next line follows: its last line's, or `last`
        where it is empty. An incomplete last line, of a process that was killed, is cut off."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(file).st_size
            tail = os.pread(file, 2 * LONGEST_LINE, max(0, size - 2 * LONGEST_LINE))
            whole = tail[: tail.rfind(b"\n") + 1]
            os.ftruncate(file, size - len(tail) + len(whole))
        except OSError:
            os.close(file)
            raise
        if whole:
            last = link_of(whole.splitlines()[-1]) or last
        cut = len(tail) - len(whole)
        _log.info("audit_log_opened", file=str(self._path), line=last.number, hash=last.hash, cut_bytes=cut)
        self.record(AuditRecord("opened", f"cut {cut} bytes" if cut else "ok"))
        return file, last

    def _run(self) -> None:
        looked_at = time.monotonic()
        while (one := self._queue.get()) is not None:
            if time.monotonic() - looked_at > self._look_s:
                looked_at = time.monotonic()
                self._follow_rename()
            self._write(*one)
        _log.info("audit_log_closed", file=str(self._path), line=self._last.number, hash=self._last.hash)
        os.close(self._file)

    def _follow_rename(self) -> None:
        """Opens the path again if it is another file by now, or none."""
        here = os.fstat(self._file)
        with contextlib.suppress(OSError):
            if os.path.exists(self._path) and os.path.samestat(here, os.stat(self._path)):
                return
            old = self._file
            self._file, self._last = self._open(self._last)
            os.close(old)

    def _write(self, at: float, record: AuditRecord) -> None:
        """Appends one line, or nothing."""
        with self._count_lock:
            unreported = self._unreported
        line, link = line_of(self._last, at, record, unreported)
        size = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line + b"\n") != len(line) + 1:
                raise OSError(0, "the file system is full")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)
            if not self._failed:
                _log.error("audit_log_not_written", file=str(self._path), reason=error.strerror)
            self._failed = True
            return self._drop()
        self._failed, self._last = False, link
        with self._count_lock:
            self._unreported -= unreported
        self.lines += 1


def open_audit_log(path: Path | None, process: int | None) -> AuditLog:
    """The audit log at a path; one that records nothing where there is none. Several `process`es of a router
    have a file each. Raises BatonError(INVALID) if it cannot be written."""
    if path is None:
        return AuditLog()
    return AuditFile(path if process is None else path.with_name(f"{path.name}.{process}"))
