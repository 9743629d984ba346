"""A cluster of IPv6 alone: pods and Services have no other address, and nothing is set for it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from baton.base.addresses import join_address
from tests.manifests.cluster import running
from tests.manifests.network import IPV6
from tests.manifests.releases import NAME, TEST, Topology, rendered

_ANSWER_S = 60.0


@pytest.mark.asyncio
@pytest.mark.parametrize("topology", ["node", "split"])
async def test_it_serves_through_its_service(topology: Topology, tmp_path: Path) -> None:
    """Probes at pods' addresses succeed, workers are registered and found at theirs, KV goes over links
    between pods (`split`), and the hook of `helm test` is answered over HTTP and gRPC."""
    async with running(rendered(topology, tls=False), {}, tmp_path, IPV6) as cluster:
        assert all(":" in pod.address for pods in cluster.pods.values() for pod in pods)
        code, output = await cluster.run_hook(TEST)
        assert code == 0, output
        proxy = cluster.services[NAME]
        address = join_address(
            proxy.address, next(one.port for one in proxy.service.ports if one.name == "http")
        )
        asked = {"model": "baton-demo", "prompt": "What is Baton?", "max_tokens": 8, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=_ANSWER_S) as client:
            answer = await client.post(f"http://{address}/v1/completions", json=asked)
        assert answer.json()["usage"]["completion_tokens"] == 8
        for service in cluster.services.values():
            for port in service.service.ports:
                if port.name == "admin" or port.name.startswith("metrics-"):
                    for host, number in service.endpoints(port):
                        async with httpx.AsyncClient(timeout=_ANSWER_S) as client:
                            page = await client.get(f"http://{join_address(host, number)}/metrics")
                        assert "baton_" in page.text
        (router,) = cluster.pods[f"{NAME}-router"]
        code, output = await router.execute(["baton", "status"], _ANSWER_S)
        assert code == 0, output
        cluster.check()
