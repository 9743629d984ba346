"""Keeps launches of steps on several devices apart from calls of other threads that may wait for a device.

A kernel of one device may wait for one of another device, which is launched next. A call that waits for the
first device, such as one that frees memory, may hold up that launch: then each waits for the other, up to the
deadline of the kernel's wait (docs/decisions/0082).
"""

from __future__ import annotations

import logging
import threading

_LOG = logging.getLogger(__name__)

# Shorter than the wait of a device for another, by default.
PATIENCE_S = 1.0


class LaunchLock:
    """A context that is held around both; a thread may hold it several times. One thread waits for another at
    most `patience_s`: if a call has not returned by then, as an abort of NCCL may not, launches go on, and
    from then on none waits."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._lock = threading.RLock()
        self._given_up = False
        self._mine = threading.local()

    def __enter__(self) -> None:
        got = not self._given_up and self._lock.acquire(timeout=self._patience_s)
        if not got and not self._given_up:
            self._given_up = True
            _LOG.warning("launches_not_kept_apart", extra={"waited_s": self._patience_s})
        self._entries.append(got)

    def __exit__(self, *_: object) -> None:
        if self._entries.pop():
            self._lock.release()

    @property
    def _entries(self) -> list[bool]:
        """True for each of the nested contexts of this thread that has the lock."""
        entries: list[bool] = self._mine.__dict__.setdefault("entries", [])
        return entries
