"""A KV cache in fp8 through a cluster: the demo model's marks are `transformers`' own within a point."""

from __future__ import annotations

import asyncio
import json

import pytest

from models.demo_training.evaluate import DEMO_MODEL, ThroughCluster, Transformers, mark
from tests.e2e.support.cluster import assert_all_free, baton_up

# 3,000 tokens of prompt on busy cores: slow is not dead.
LONG_TIMEOUTS = "supervision: {hang_timeout_s: 60}\nrouter: {queue_timeout_s: 600}\n"
COUNTS = {"retrieve-1000": 60, "retrieve-3000": 12, "copy": 100, "arithmetic": 60, "json": 100}
BLOCK_TOKENS = 16


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("transport", ["grpc", "ipc"])
def test_marks_are_transformers_own_within_a_point(transport: str) -> None:
    flags = ("--dtype", "float32", "--kv-dtype", "fp8", "--transport", transport)
    right = {"ours": 0, "theirs": 0}
    with baton_up(DEMO_MODEL, *flags, config=LONG_TIMEOUTS) as cluster:
        through, reference = ThroughCluster(cluster.grpc_address), Transformers(DEMO_MODEL, "float32", "cpu")
        for part, count in COUNTS.items():
            ours, theirs = (mark(one, (part,), count)[part] for one in (through, reference))
            print(
                f"\nPROOF {part} of {count}, KV in fp8: {ours.percent:.1f} %, "
                f"transformers {theirs.percent:.1f} %",
                end="",
            )
            assert abs(ours.right - theirs.right) <= max(1, count // 100)
            right["ours"] += ours.right
            right["theirs"] += theirs.right
        asyncio.run(assert_all_free(cluster, 1.0))
        report = asyncio.run(cluster.reports())["decode-0"]
    assert abs(right["ours"] - right["theirs"]) <= 0.01 * sum(COUNTS.values())
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    heads = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    assert list(report.block_bytes) == [heads * BLOCK_TOKENS * (config["head_dim"] + 2)]
    assert (report.kv_dtype, report.kv_bytes % report.block_bytes[0]) == ("float8_e4m3fn", 0)
