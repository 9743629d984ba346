"""The page's cluster, which is cut, delayed and moved beside streams."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.hosts.load import GAP_S, streaming
from tests.hosts.network import Network
from tests.hosts.site import Site, site

pytestmark = pytest.mark.asyncio(loop_scope="module")
CUT_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(tmp_path_factory.mktemp("hosts")) as running:
        yield running


@contextlib.contextmanager
def cut(network: Network, pairs: list[tuple[str, str]]) -> Iterator[None]:
    """Drops frames from the first host to the second while the block runs."""
    for source, target in pairs:
        network.rule(source, target, drop=True)
    try:
        yield
    finally:
        for source, target in pairs:
            network.rule(source, target)


def _connects(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), 0.5):
            return True
    except OSError:
        return False


async def test_the_pages_cluster_serves_and_its_firewalls_hold(cluster: Site) -> None:
    """The firewalls open what the hosts need of one another, and nothing to others."""
    await cluster.until_whole()
    async with streaming(cluster) as load:
        await load.answered(6)
    addresses = cluster.addresses
    assert _connects(addresses["router"], 50051)
    strange = [("redis", 6379), ("p1", 50060), ("d1", 50060), ("d1", 50100), ("d2", 8001), ("router", 8001)]
    assert not [(name, port) for name, port in strange if _connects(addresses[name], port)]


CUTS = {
    "router-d1": [("router", "d1"), ("d1", "router")],
    "router-to-d1": [("router", "d1")],
    "d1-to-router": [("d1", "router")],
    "p1-d1": [("p1", "d1"), ("d1", "p1")],
    "p1-to-d1": [("p1", "d1")],
    "d1-to-p1": [("d1", "p1")],
}


@pytest.mark.parametrize("which", CUTS)
async def test_a_cut_of_20_s(cluster: Site, which: str) -> None:
    before = cluster.network.counts().get("cut", 0)
    async with streaming(cluster) as load:
        with cut(cluster.network, CUTS[which]):
            await asyncio.sleep(CUT_S)
            # Another pair is free all the time, so outputs go on to end.
            await load.answered(3)
            if "p1" in which:
                assert await cluster.failed_links() == {("p1", "d1")}
        assert await cluster.is_ready()
    assert cluster.network.counts()["cut"] > before


@pytest.mark.parametrize("role", [["p1"], ["d1", "d2"]], ids=["prefill", "decode"])
async def test_no_worker_of_a_role_is_left(cluster: Site, role: list[str]) -> None:
    """Requests wait, and go on; the router stays ready as long as they wait (`queue_timeout_s`)."""
    lasts_s = 8.0
    async with streaming(cluster, gap_s=lasts_s + GAP_S):
        with cluster.network.between("router", role, drop=True):
            await asyncio.sleep(lasts_s)
            assert not await cluster.ready_workers() & set(role)
            assert await cluster.is_ready()


async def test_everyone_is_cut_from_redis(cluster: Site) -> None:
    everyone = [name for name in cluster.hosts if name != "redis"]
    async with streaming(cluster) as load:
        with cluster.network.between("redis", everyone, drop=True):
            await asyncio.sleep(CUT_S)
            await load.answered(3)
    assert cluster.services["router"].events("redis_unavailable")
