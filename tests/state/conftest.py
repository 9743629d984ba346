"""One real server a kind for the whole run; each test has a namespace of its own in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis.exceptions import RedisError

from baton.state.client.connect import make_client, parse_url
from baton.state.embedded import EmbeddedServer, free_port, server_binary
from tests.state.raw import Raw, raw
from tests.support.waiting import until

pytest.register_assert_rewrite("tests.state.contract")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_url() -> AsyncIterator[str]:
    """The URL of a single Redis server."""
    server = await EmbeddedServer.start()
    yield server.url
    await server.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A Redis Cluster of one node that has all slots."""
    folder = tmp_path_factory.mktemp("cluster")
    extra = f"cluster-enabled yes\ncluster-port {free_port()}\ndir {folder}\n"
    server = await EmbeddedServer.start(extra=extra)
    async with raw(server.url) as client:
        await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await until(lambda: _serves(client), 10)
    yield server.url.replace("redis://", "redis+cluster://").removesuffix("/0")
    await server.stop()


async def _serves(client: Raw) -> bool:
    return b"cluster_state:ok" in await client.execute_command("CLUSTER", "INFO")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sentinel_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A server that a Sentinel watches; the first Sentinel of the URL is dead."""
    server = await EmbeddedServer.start()
    port, dead = free_port(), free_port()
    config = _sentinel_config(tmp_path_factory.mktemp("sentinel"), port, server)
    sentinel = await asyncio.create_subprocess_exec(
        server_binary(), config, "--sentinel", stdout=asyncio.subprocess.DEVNULL
    )
    url = f"redis+sentinel://:{server.password}@127.0.0.1:{dead},127.0.0.1:{port}/ours/0"
    await until(lambda: _names_a_master(url), 10)
    yield url
    sentinel.terminate()
    await sentinel.wait()
    await server.stop()


def _sentinel_config(folder: Path, port: int, server: EmbeddedServer) -> Path:
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor ours 127.0.0.1 {server.port} 1\n"
        f"sentinel auth-pass ours {server.password}\n"
    )
    return config


async def _names_a_master(url: str) -> bool:
    client = make_client(parse_url(url))
    try:
        return await client.ping()
    except RedisError:
        return False
    finally:
        await client.aclose()
