"""One prefill and one decode worker on two GPUs: the demo model finds the same over every transport, and
within a point of it where KV travels in eight bits."""

from __future__ import annotations

import asyncio

import pytest

from models.demo_training.evaluate import DEMO_MODEL, ThroughCluster, mark
from tests.e2e.support.cluster import Cluster, assert_all_free, baton_up

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(600)]

PART, QUESTIONS, AT_ONCE = "retrieve-1000", 200, 32
WAYS = [("grpc", "native"), ("ipc", "native"), ("nccl", "native"), ("grpc", "int8"), ("ipc", "fp8")]


def test_the_demo_models_score_is_the_same_over_every_transport() -> None:
    scores = {way: score(*way) for way in WAYS}
    print(f"\nPROOF {PART} of {QUESTIONS}: {scores}", end="")
    native = {way: found for way, found in scores.items() if way[1] == "native"}
    assert len(set(native.values())) == 1, native
    (percent,) = set(native.values())
    assert percent > 90
    assert all(abs(found - percent) <= 1.0 for found in scores.values()), scores


def score(transport: str, kv_wire: str) -> float:
    flags = "--device", "cuda", "--transport", transport, "--kv-wire", kv_wire, "--slots", f"{AT_ONCE}"
    with baton_up(DEMO_MODEL, *flags, every_gpu=True) as cluster:
        percent = mark(ThroughCluster(cluster.grpc_address, AT_ONCE), (PART,), QUESTIONS)[PART].percent
        taken = asyncio.run(links_of(cluster))
    assert taken == [transport, transport]
    return percent


async def links_of(cluster: Cluster) -> list[str]:
    """Transports of the links at both ends, once all resources are free again."""
    await assert_all_free(cluster, 3.0)
    reports = await cluster.reports()
    return [link.transport for report in reports.values() for link in report.links]
