"""Lends `baton up`'s stderr to processes that Ray starts, whose own goes to a file that nobody reads.

A Unix socket in the private folder of the local Ray; who connects is sent the descriptor itself, so that no
line passes through a process of ours.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

_BORROW_S = 5.0


def lend_stderr(path: Path) -> None:
    """Serves for as long as this process lives."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind(str(path))
    door.listen(64)
    threading.Thread(target=_serve, args=(door,), name="log-door", daemon=True).start()


def _serve(door: socket.socket) -> None:
    while True:
        guest, _ = door.accept()
        with guest, contextlib.suppress(OSError):
            socket.send_fds(guest, [b"."], [2])


def borrow_stderr(path: str) -> None:
    """Makes the lent descriptor this process's stderr, and so that of the children it starts from now on.
    Where nobody lends (any more), it keeps its own."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guest:
        guest.settimeout(_BORROW_S)
        guest.connect(path)
        _, descriptors, _, _ = socket.recv_fds(guest, 1, 1)
        for descriptor in descriptors:
            os.dup2(descriptor, 2)
            os.close(descriptor)
