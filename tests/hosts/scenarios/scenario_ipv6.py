"""The page's cluster without IPv4."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.hosts.addresses import over_ipv6
from tests.hosts.load import streaming
from tests.hosts.site import Site, site

pytestmark = pytest.mark.asyncio(loop_scope="module")
_CUT_S = 10.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(tmp_path_factory.mktemp("hosts"), over_ipv6) as running:
        yield running


@pytest.mark.parametrize("one", ["router", "p1"])
async def test_a_cut(cluster: Site, one: str) -> None:
    assert ":" in cluster.addresses["router"]
    async with streaming(cluster) as load:
        with cluster.network.between(one, ["d1"], drop=True):
            await asyncio.sleep(_CUT_S)
            await load.answered(3)


async def test_a_host_returns_with_another_address(cluster: Site) -> None:
    async with streaming(cluster) as load:
        cluster.hosts["d2"].power_off()
        await asyncio.sleep(_CUT_S)
        await cluster.boot_again("d2", cluster.another_address("d2"))
        await load.answered(3)
