"""Before the clock starts: how long a request takes that is alone, and a warm-up as wide as the load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.targets.preflight import preflight
from tests.loadgen.builders import settings
from tests.loadgen.fake_server import Behaviour, serving

ALONE_S = 0.1


@pytest.mark.parametrize(
    ("load", "busiest"),
    [
        ({"rate": 100.0}, 100.0),
        ({"stages": ("60:1", "60:10-100", "60:20~5")}, 100.0),
        ({"concurrency": 12, "num_requests": 100}, 12 / ALONE_S),
        ({"trace": (0, *range(1000, 2000, 10))}, 100.0),
    ],
)
async def test_a_warm_up_is_as_wide_as_the_load(load: dict[str, Any], busiest: float, tmp_path: Path) -> None:
    """The warm-up has the load's busiest concurrency, whatever says when requests come."""
    if "trace" in load:
        file = tmp_path / "trace.jsonl"
        lines = [{"timestamp": at, "input_length": 3, "output_length": 1} for at in load["trace"]]
        file.write_text("\n".join(map(json.dumps, lines)))
        load = {"trace": {"file": str(file), "format": "mooncake"}}
    async with serving(Behaviour(first_s=ALONE_S)) as (server, grpc_url, _):
        before = await preflight(settings(url=grpc_url, prompts={"output_len": "1"}, **load))
        assert before.lone_s >= ALONE_S
        assert before.warmups >= max(4, busiest * ALONE_S)
        assert server.arrived == 2 + before.warmups


async def test_a_very_wide_load_is_warmed_up_no_narrower() -> None:
    async with serving(Behaviour(first_s=0.2)) as (server, grpc_url, _):
        before = await preflight(settings(url=grpc_url, prompts={"output_len": "1"}, rate=1500.0))
        assert 300 <= before.warmups == server.arrived - 2


async def test_as_many_as_the_user_asks_for() -> None:
    async with serving(Behaviour()) as (server, grpc_url, _):
        before = await preflight(settings(url=grpc_url, generator={"warmup": 1}))
        assert (before.warmups, server.arrived) == (1, 3)
