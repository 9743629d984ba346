"""A small file whose content may change while the process runs, such as a Secret that Kubernetes mounts.

It is looked at by calls, not in the background: at most every `look_s` seconds, or at once where the caller
has seen that its value is out of date.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from baton.base.errors import BatonError, ErrorKind
from baton.base.structured_logs import structlog

T = TypeVar("T")

LOOK_S = 10.0
_MOST_BYTES = 1024 * 1024

_log = structlog.get_logger(part="files")


class FollowedFile(Generic[T]):
    """The latest valid value of a file. A file that is away, unreadable or invalid leaves the last one, and
    is logged once."""

    def __init__(
        self,
        path: Path,
        name: str,
        parse: Callable[[str], T],
        clock: Callable[[], float] = time.monotonic,
        look_s: float = LOOK_S,
    ) -> None:
        """Reads the file. `name`: of the setting, for messages. `parse` raises BatonError(INVALID) without
        the content in its message.

        Raises BatonError(INVALID) where there is no valid value.
        """
        self._path = path
        self._name = name
        self._parse = parse
        self._clock = clock
        self._look_s = look_s
        self._looked_at = clock()
        self._seen: tuple[int, ...] = ()
        self._failed = False
        self.value = self._read()

    def look(self, *, at_once: bool = False) -> bool:
        """Reads the file again if it has been replaced or written; returns True if `value` has changed."""
        now = self._clock()
        if not at_once and now - self._looked_at < self._look_s:
            return False
        self._looked_at = now
        try:
            if not self._failed and self._signature() == self._seen:
                return False
            value = self._read()
        except (BatonError, OSError) as error:
            if not self._failed:
                _log.warning("file_not_followed", file=str(self._path), reason=str(error))
            self._failed = True
            return False
        changed = value != self.value
        if changed or self._failed:
            _log.info("file_followed", file=str(self._path))
        self.value, self._failed = value, False
        return changed

    def _signature(self) -> tuple[int, ...]:
        status = os.stat(self._path)
        return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)

    def _read(self) -> T:
        try:
            seen = self._signature()  # before the content, so that a later change is noticed
            with open(self._path, encoding="utf-8") as file:
                text = file.read(_MOST_BYTES + 1)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise BatonError(ErrorKind.INVALID, f"cannot read {self._name} {self._path}: {reason}") from None
        if len(text) > _MOST_BYTES:
            raise BatonError(
                ErrorKind.INVALID, f"{self._name} {self._path} is larger than {_MOST_BYTES} bytes"
            )
        value = self._parse(text)
        self._seen = seen
        return value
