"""KV in eight bits on the wire: the demo model still finds what stands in its prompt; fewer bytes travel.

A few answers of two engines: tests/worker/engine/test_kv_wire.py."""

from __future__ import annotations

import asyncio
import functools
import json

import pytest

from baton.v1.worker_pb2 import IntegrityReport
from models.demo_training.evaluate import DEMO_MODEL, ThroughCluster, Transformers, mark
from tests.e2e.support.cluster import Cluster, assert_all_free, baton_up

# 3,000 tokens of prompt on busy cores: slow is not dead.
LONG_TIMEOUTS = "supervision: {hang_timeout_s: 60}\nrouter: {queue_timeout_s: 600}\n"
FULL = {"retrieve-1000": 200, "retrieve-3000": 60}
BLOCK_TOKENS = 16


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("kv_wire", "transport"), [("int8", "grpc"), ("fp8", "ipc")])
def test_scores_are_transformers_own_within_a_point(kv_wire: str, transport: str) -> None:
    flags = (
        "--dtype",
        "float32",
        "--kv-wire",
        kv_wire,
        "--transport",
        transport,
        "--block-tokens",
        f"{BLOCK_TOKENS}",
    )
    with baton_up(DEMO_MODEL, *flags, config=LONG_TIMEOUTS) as cluster:
        through = ThroughCluster(cluster.grpc_address)
        for part, count in FULL.items():
            ours = mark(through, (part,), count)[part].percent
            theirs = reference_percent(part, count)
            print(
                f"\nPROOF {part} of {count}, KV as {kv_wire}: {ours:.1f} %, transformers {theirs:.1f} %",
                end="",
            )
            assert abs(ours - theirs) <= 1.0
            assert ours > 90
        sent = asyncio.run(prefill_report(cluster))
    (shipped,), (block,) = sent.blocks_shipped, sent.block_bytes
    assert sent.bytes_shipped == shipped * block > 0
    assert [link.transport for link in sent.links] == [transport]
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    rows = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * BLOCK_TOKENS
    assert block == rows * (config["head_dim"] + 4)  # a byte an element and a scale, in place of four bytes


@functools.cache
def reference_percent(part: str, count: int) -> float:
    """The score of `transformers`, once for all wire formats."""
    return mark(Transformers(DEMO_MODEL, "float32", "cpu"), (part,), count)[part].percent


async def prefill_report(cluster: Cluster) -> IntegrityReport:
    await assert_all_free(cluster, 1.0)
    return (await cluster.reports())["prefill-0"]
