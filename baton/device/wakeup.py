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
            pass  # the counter is at its maximum: the loop will wake anyway

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass  # it was not set

    def close(self) -> None:
        os.close(self._fd)
