"""The URL of Redis in a file: a new password is followed without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from baton.base.errors import BatonError, ErrorKind
from baton.state import State
from baton.state.embedded import EmbeddedServer
from tests.state.raw import raw
from tests.support.mounted_secret import mount_secret


@pytest_asyncio.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    server = await EmbeddedServer.start(password="first-password")
    yield server
    await server.stop()


def mounted(folder: Path, url: str) -> Path:
    """Mounts a Secret with the URL, in place of an earlier one."""
    mount_secret(folder, redis_url=url + "\n")
    return folder / "redis-url"


@contextlib.asynccontextmanager
async def opened(server: EmbeddedServer, path: Path) -> AsyncIterator[State]:
    state = State.at(server.url, url_file=path)
    try:
        yield state
    finally:
        await state.close()


async def set_password(server: EmbeddedServer, password: str, *, disconnect: bool) -> str:
    """Changes the server's password, and ends its connections where asked; returns the new URL."""
    async with raw(server.url) as client:
        await client.config_set("requirepass", password)
        if disconnect:
            await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    server.password = password
    return server.url


async def test_a_refused_password_has_the_file_read_again(server: EmbeddedServer, tmp_path: Path) -> None:
    """The server forgets the old password and every connection; the file changes a little later."""
    path = mounted(tmp_path, server.url)
    with capture_logs() as logs:
        async with opened(server, path) as state:
            await state.check()
            url = await set_password(server, "second-password", disconnect=True)
            with pytest.raises(BatonError) as refusal:
                await state.check()
            assert refusal.value.kind is ErrorKind.UNAUTHENTICATED
            mounted(tmp_path, url)
            with pytest.raises(BatonError):
                await state.check()  # the last with the old password
            for _ in range(20):
                await state.check()
    assert "-password" not in str(logs)


async def test_a_new_password_is_used_before_the_old_one_is_refused(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    """Where the file changes first, no call fails: it is looked at every 10 s."""
    path = mounted(tmp_path, server.url)
    async with opened(server, path) as state:
        await state.check()
        url = await set_password(server, "second-password", disconnect=False)
        mounted(tmp_path, url)
        await state.check()  # over a connection that has authenticated
        assert state._connection is not None
        assert state._connection._followed is not None
        state._connection._followed._looked_at -= 10
        await asyncio.gather(*(state.check() for _ in range(40)))
        assert state._connection._endpoint.password == "second-password"


async def test_an_invalid_file_leaves_the_last_url(server: EmbeddedServer, tmp_path: Path) -> None:
    path = mounted(tmp_path, server.url)
    async with opened(server, path) as state:
        assert state._connection is not None
        followed = state._connection._followed
        assert followed is not None
        with capture_logs() as logs:
            for damage in (lambda: mounted(tmp_path, "http://:secret-word@nowhere"), lambda: os.unlink(path)):
                damage()
                assert not followed.look(at_once=True)
                assert not followed.look(at_once=True)
                await state.check()
        assert [log["event"] for log in logs] == ["file_not_followed"]
        assert "secret-word" not in str(logs)
        mounted(tmp_path, server.url)
        assert not followed.look(at_once=True)  # the same value as before


def test_a_file_that_is_away_is_refused(tmp_path: Path) -> None:
    async def start() -> None:
        State.at("redis://127.0.0.1:1/0", url_file=tmp_path / "redis-url")

    with pytest.raises(BatonError, match=r"cannot read redis_url_file .*redis-url: No such file"):
        asyncio.run(start())
