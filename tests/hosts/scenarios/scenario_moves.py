"""Bad links of the page's cluster that are not cut, and hosts that return, move or share a name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.hosts.load import GAP_S, streaming
from tests.hosts.site import Site, site

pytestmark = pytest.mark.asyncio(loop_scope="module")
AWAY_S = 6.0
# Bytes of an Ethernet header.
_HEADER = 14


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(tmp_path_factory.mktemp("hosts")) as running:
        yield running


async def test_large_packets_are_lost_on_one_path(cluster: Site) -> None:
    """A path with a smaller MTU whose ICMP messages are filtered."""
    async with streaming(cluster) as load:
        with cluster.network.between("p1", ["d1"], largest=1280 + _HEADER):
            await asyncio.sleep(15.0)
            await load.answered(3)
        assert await cluster.is_ready()
    assert cluster.network.counts()["too large"]


async def test_every_link_takes_3_s_for_a_while(cluster: Site) -> None:
    """No worker is usable meanwhile; requests wait, and go on."""
    lasts_s, delay_s = 7.0, 3.0
    async with streaming(cluster, gap_s=lasts_s + delay_s + GAP_S):
        for host in cluster.hosts:
            cluster.network.both(host, cluster.hosts, delay_s=delay_s)
        await asyncio.sleep(lasts_s)
        for host in cluster.hosts:
            cluster.network.both(host, cluster.hosts)


async def test_the_whole_network_is_gone_for_a_while(cluster: Site) -> None:
    lasts_s = 8.0
    async with streaming(cluster, gap_s=lasts_s + GAP_S):
        for host in cluster.hosts:
            cluster.network.both(host, cluster.hosts, drop=True)
        await asyncio.sleep(lasts_s)
        for host in cluster.hosts:
            cluster.network.both(host, cluster.hosts)


async def test_a_slow_link(cluster: Site) -> None:
    """5 Mbit/s from prefill to decode."""
    async with streaming(cluster) as load:
        for target in ("d1", "d2"):
            cluster.network.rule("p1", target, bytes_s=625_000)
        await asyncio.sleep(10.0)
        await load.answered(3)
        for target in ("d1", "d2"):
            cluster.network.rule("p1", target)


async def test_a_host_loses_power_and_returns(cluster: Site) -> None:
    async with streaming(cluster) as load:
        cluster.hosts["d1"].power_off()
        await asyncio.sleep(AWAY_S)
        await load.answered(3)
        await cluster.boot_again("d1")


async def test_a_host_returns_with_another_address(cluster: Site) -> None:
    async with streaming(cluster) as load:
        cluster.hosts["d1"].power_off()
        await asyncio.sleep(AWAY_S)
        await cluster.boot_again("d1", cluster.another_address("d1"))
        await load.answered(3)
    assert f"{cluster.addresses['d1']}:50060" in await cluster.worker_addresses()


async def test_a_name_changes_its_address(cluster: Site) -> None:
    """Workers that are registered with a name, which leads to the new address once the host has that."""
    cluster.change_file("d2", "/etc/baton/worker.env", cluster.addresses["d2"], "d2.lab")
    async with streaming(cluster) as load:
        await cluster.services["d2"].restart()
        await load.answered(3)
        await cluster.until_ready_workers()
        cluster.hosts["d2"].power_off()
        await asyncio.sleep(AWAY_S)
        await cluster.boot_again("d2", cluster.another_address("d2"))
    assert "d2.lab:50060" in await cluster.worker_addresses()


async def test_two_hosts_with_one_name_do_not_take_turns(cluster: Site) -> None:
    """The file was copied: the newer host serves; the other one waits for the name, and then serves."""
    old, new = cluster.services["d1"], cluster.services["d2"]
    codes, starts = len(old.codes), (len(old.events("serving")), len(new.events("serving")))
    async with streaming(cluster) as load:
        cluster.change_file("d2", "/etc/baton/worker.env", "BATON_NAME=d2", "BATON_NAME=d1")
        await new.restart()
        await old.until("name_taken")
        await asyncio.sleep(15.0)
        await load.answered(3)
        assert old.codes[codes:] == [4]
        assert (len(old.events("serving")), len(new.events("serving"))) == (starts[0], starts[1] + 1)
        assert all("d2" in line for line in old.events("name_taken"))
        cluster.change_file("d2", "/etc/baton/worker.env", "BATON_NAME=d1", "BATON_NAME=d2")
        await new.restart()
        await cluster.until_ready_workers()
