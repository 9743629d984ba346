"""The release under Ray with TLS everywhere, Ray's own processes included."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.certificates import Authority
from tests.manifests.internal_ports import answer, calling_context
from tests.manifests.releases import NAME
from tests.manifests.site import Site, site

pytestmark = pytest.mark.asyncio(loop_scope="module")
# Ray notices a lost head within a minute.
_SERVES_AGAIN_S = 200.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def release(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site("ray", tmp_path_factory.mktemp("ray"), tls=True) as running:
        yield running


async def test_helm_test(release: Site) -> None:
    await release.helm_test()
    await release.metrics_are_scraped()


async def test_strangers_get_nothing_of_ray(release: Site, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither at the control store nor at a node; nor with a certificate of the other authority."""
    folder = tmp_path_factory.mktemp("strangers")
    secret = release.cluster.store["secret", f"{NAME}-ray-authority"]
    (folder / "ca.crt").write_text(secret["tls.crt"])
    ray = release.cluster.issuer.authorities[f"{NAME}-ray-authority"]
    asked = [
        (pod, pod.template.container.ports[name])
        for component, name in (("ray-head", "gcs-server"), ("ray-head", "ray-node"), ("workers", "ray-node"))
        for pod in release.cluster.pods[f"{NAME}-{component}"]
    ]
    strangers: dict[str, ssl.SSLContext | None] = {
        "plaintext": None,
        "no certificate": calling_context(ray, None, folder),
        "foreign": calling_context(ray, Authority("foreign").issue("10.244.0.9"), folder),
        "expired": calling_context(ray, ray.issue("10.244.0.9", days=-1), folder),
        "a router": calling_context(ray, release.authority.issue(f"router.{NAME}.baton.internal"), folder),
    }
    for who, context in strangers.items():
        answers = await asyncio.gather(*(answer(pod, port, context) for pod, port in asked))
        assert not any(answers), f"{who} is answered: {answers}"
    known = calling_context(ray, ray.issue("10.244.0.9"), folder)
    assert all(await asyncio.gather(*(answer(pod, port, known) for pod, port in asked)))


async def test_routers_and_nodes_are_replaced_under_load(release: Site) -> None:
    # `ray start` of 2.60 ends with 1 after SIGTERM, however well it has drained.
    await release.replaced_under_load("router", "workers", times=2, clients=2, codes={"workers": 1})
    await release.helm_test()


async def test_the_release_serves_again_after_a_lost_head(release: Site) -> None:
    """Ray's control store is gone with its head. Nodes and the supervisor end, are started again by the
    kubelet, and join the new head."""
    cluster = release.cluster
    others = [pod for role in ("workers", "supervisor") for pod in cluster.pods[f"{NAME}-{role}"]]
    for pod in others:
        pod.may_restart = True
    await cluster.replace(f"{NAME}-ray-head")
    async with asyncio.timeout(_SERVES_AGAIN_S):
        while not all(pod.restarts and pod.ready for pod in others):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    await release.helm_test()
