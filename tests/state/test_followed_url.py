"""The URL of Redis in a file: a new password is followed without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from baton.base.errors import BatonError, ErrorKind
from baton.base.followed_file import FollowedFile
from baton.state import State
from baton.state import state as state_module
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


@pytest.fixture
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call looks at the file, as if 10 s had passed."""
    monkeypatch.setattr(state_module, "FollowedFile", functools.partial(FollowedFile, look_s=0.0))


async def end_connections(server: EmbeddedServer) -> None:
    """Ends the server's connections to its clients."""
    async with raw(server.url) as client:
        await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def set_password(server: EmbeddedServer, password: str, *, disconnect: bool) -> str:
    """Changes the server's password, and ends its connections where asked; returns the new URL."""
    async with raw(server.url) as client:
        await client.config_set("requirepass", password)
    server.password = password
    if disconnect:
        await end_connections(server)
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


@pytest.mark.usefixtures("looks_always")
async def test_a_new_password_is_used_before_the_old_one_is_refused(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    """The file is looked at every 10 s: where it changes first, no call fails."""
    path = mounted(tmp_path, server.url)
    async with opened(server, path) as state:
        await state.check()
        url = await set_password(server, "second-password", disconnect=False)
        mounted(tmp_path, url)
        await asyncio.gather(*(state.check() for _ in range(40)))
        path.unlink()  # it has been read
        await end_connections(server)
        await state.check()


@pytest.mark.usefixtures("looks_always")
async def test_an_invalid_file_leaves_the_last_url(server: EmbeddedServer, tmp_path: Path) -> None:
    path = mounted(tmp_path, server.url)
    async with opened(server, path) as state:
        with capture_logs() as logs:
            for damage in (lambda: mounted(tmp_path, "http://:secret-word@nowhere"), lambda: os.unlink(path)):
                damage()
                await state.check()
                await state.check()
        assert [log["event"] for log in logs] == ["file_not_followed"]
        assert "secret-word" not in str(logs)
        mounted(tmp_path, server.url)
        await state.check()


def test_a_file_that_is_away_is_refused(tmp_path: Path) -> None:
    async def start() -> None:
        State.at("redis://127.0.0.1:1/0", url_file=tmp_path / "redis-url")

    with pytest.raises(BatonError, match=r"cannot read redis_url_file .*redis-url: No such file"):
        asyncio.run(start())
