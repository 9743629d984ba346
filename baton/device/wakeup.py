"""Wakes a loop that waits on file descriptors, from any thread, or from another process."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from functools import partial


class Wakeup:
    """An eventfd: `set` from any thread, `clear` by the loop that selects on `fileno`."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: one that another process made and passed to this one; else a new one, which is closed with
        this object."""
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fd is None else fd
        self._close: Callable[[], object] = partial(os.close, self._fd)
        if fd is None:
            closing = weakref.finalize(self, os.close, self._fd)
            closing.atexit = False
            self._close = closing

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the counter is at its maximum: the loop wakes anyway
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was not set
            os.eventfd_read(self._fd)

    def close(self) -> None:
        self._close()
