"""One real server a kind for the whole run; each test has a namespace of its own in it."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from baton.state.embedded import EmbeddedServer, _binary, _free_port

pytest.register_assert_rewrite("tests.state.contract")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_url() -> AsyncIterator[str]:
    """A single server."""
    server = await EmbeddedServer.start()
    yield server.url
    await server.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A Redis Cluster of one node that has all slots."""
    folder = tmp_path_factory.mktemp("cluster")
    server = await EmbeddedServer.start(extra=f"cluster-enabled yes\ndir {folder}\n")
    client = Redis(port=server.port, password=server.password)
    await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    async with asyncio.timeout(10):
        while b"cluster_state:ok" not in await client.execute_command("CLUSTER", "INFO"):
            await asyncio.sleep(0.02)
    await client.aclose()
    yield server.url.replace("redis://", "redis+cluster://").removesuffix("/0")
    await server.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sentinel_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A server that a Sentinel watches; the first Sentinel of the URL is dead."""
    server = await EmbeddedServer.start()
    port, dead = _free_port(), _free_port()
    config: Path = tmp_path_factory.mktemp("sentinel") / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor ours 127.0.0.1 {server.port} 1\n"
        f"sentinel auth-pass ours {server.password}\n"
    )
    with subprocess.Popen([_binary(), config, "--sentinel"], stdout=subprocess.DEVNULL) as sentinel:
        await _sentinel_knows(port)
        yield f"redis+sentinel://:{server.password}@127.0.0.1:{dead},127.0.0.1:{port}/ours/0"
        sentinel.terminate()
    await server.stop()


async def _sentinel_knows(port: int) -> None:
    """Returns once the Sentinel has seen its master up."""
    client = Redis(port=port)
    async with asyncio.timeout(10):
        while True:
            try:
                masters = await client.sentinel_masters()
            except RedisConnectionError:
                masters = {}
            if "ours" in masters and masters["ours"]["is_master"]:
                break
            await asyncio.sleep(0.02)
    await client.aclose()
