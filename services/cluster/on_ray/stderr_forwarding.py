"""Shares `baton up`'s stderr with processes that Ray starts, whose own stderr goes to a file.

A Unix socket in the private folder of the local Ray sends the file descriptor itself to each process that
connects, so no log line is copied.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

_CONNECT_S = 5.0


def share_stderr(path: Path) -> None:
    """Serves the descriptor at the socket `path` in a daemon thread, until this process ends."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(64)
    threading.Thread(target=_serve, args=(listener,), name="stderr-sharing", daemon=True).start()


def _serve(listener: socket.socket) -> None:
    while True:
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError):
            socket.send_fds(peer, [b"."], [2])


def use_shared_stderr(path: str) -> None:
    """Replaces this process's stderr, and that of its future children, by the shared one. Keeps its own
    where the socket does not answer."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_CONNECT_S)
        peer.connect(path)
        _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
        for descriptor in descriptors:
            os.dup2(descriptor, 2)
            os.close(descriptor)
