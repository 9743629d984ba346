"""The reduced size: one release with TLS everywhere, each role of it replaced once."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.manifests.site import Site, site

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def release(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site("node", tmp_path_factory.mktemp("node"), tls=True, drain_s=3) as running:
        yield running


async def test_containers(release: Site) -> None:
    await release.every_port_is_declared()
    await release.containers_are_confined()
    await release.metrics_are_scraped()


async def test_strangers_get_nothing(release: Site) -> None:
    await release.strangers_get_nothing()


async def test_each_role_is_replaced_under_load(release: Site) -> None:
    release.renew_certificates()
    await release.replaced_under_load("router", "workers", times=1, clients=1, pause_s=0.5)
    await release.helm_test()
