"""The full size: each topology, in plaintext and with TLS, each role replaced three times."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.manifests.releases import Topology
from tests.manifests.site import Site, site

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROLES = {"node": ("router", "workers"), "split": ("router", "prefill", "decode")}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[("node", False), ("node", True), ("split", False), ("split", True)],
    ids=["node-plain", "node-tls", "split-plain", "split-tls"],
)
async def release(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Topology, Site]]:
    topology, tls = request.param
    async with site(topology, tmp_path_factory.mktemp(topology), tls=tls) as running:
        yield topology, running


async def test_ports(release: tuple[Topology, Site]) -> None:
    await release[1].every_port_is_declared()


async def test_containers_are_confined(release: tuple[Topology, Site]) -> None:
    await release[1].containers_are_confined()
    await release[1].metrics_are_scraped()


async def test_helm_test_and_the_commands_of_the_notes(release: tuple[Topology, Site]) -> None:
    await release[1].helm_test()
    await release[1].commands_of_the_notes_work()


async def test_strangers_get_nothing(release: tuple[Topology, Site]) -> None:
    _, running = release
    if running.certificates is not None:
        await running.strangers_get_nothing()


async def test_certificates_are_renewed_without_a_restart(release: tuple[Topology, Site]) -> None:
    _, running = release
    if running.certificates is not None:
        before = [pod.pid for pod in running.workers()]
        running.renew_certificates()
        await running.until_renewed()
        await running.helm_test()
        assert [pod.pid for pod in running.workers()] == before


async def test_api_keys_are_followed_without_a_restart(release: tuple[Topology, Site]) -> None:
    _, running = release
    if running.certificates is not None:
        await running.keys_are_followed()


@pytest.mark.timeout(1000)  # twelve replacements, one after the other
async def test_each_role_is_replaced_under_load(release: tuple[Topology, Site]) -> None:
    topology, running = release
    await running.replaced_under_load(*ROLES[topology], "redis", times=3, clients=2)
    await running.helm_test()
