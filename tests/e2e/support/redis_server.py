"""A Redis of the test's own, that can be frozen, killed, and brought back empty at the same place."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator

from baton.base.parent_death import tied
from baton.state.embedded import free_port, server_binary, server_configuration

_START_S = 10.0


class RedisServer:
    """Runs from `start` on. Its password is part of `url`."""

    def __init__(self) -> None:
        self.port = free_port()
        self.password = secrets.token_urlsafe(24)
        self._folder = tempfile.gettempdir()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Returns once it answers; it has nothing."""
        self._process = subprocess.Popen(
            tied([str(server_binary()), "-"]), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert self._process.stdin is not None
        self._process.stdin.write(server_configuration(self.port, self.password, self._folder).encode())
        self._process.stdin.close()
        deadline = time.monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None, "it ended"
            assert time.monotonic() < deadline, "it does not answer"
            time.sleep(0.02)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_START_S)

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), 1) as connection,
        ):
            connection.sendall(f"AUTH {self.password}\r\n".encode())
            return connection.recv(5) == b"+OK\r\n"
        return False


@contextlib.contextmanager
def redis_server() -> Iterator[RedisServer]:
    """One that runs, and is gone afterwards."""
    server = RedisServer()
    server.start()
    try:
        yield server
    finally:
        server.kill()
