"""Wakes a loop that waits on file descriptors, from any thread."""

from __future__ import annotations

import os


class Wakeup:
    """An eventfd: `set` from any thread, `clear` by the loop that selects on `fileno`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        try:
            os.eventfd_write(self._fd, 1)
        except BlockingIOError:
            pass  # the counter is at its ceiling: the loop is about to wake anyway

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass  # nobody had set it

    def close(self) -> None:
        os.close(self._fd)
