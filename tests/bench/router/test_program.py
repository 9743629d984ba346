"""`bench.router` between its fake workers and clients: every case is measured."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SHORT = (
    "--rates", "100", "--streams", "2", "--open", "2", "--output-len", "20", "--warm-s", "0.2",
    "--seconds", "0.5", "--client-processes", "1", "--json",
)  # fmt: skip


@pytest.mark.parametrize(
    "cases", ["sse", pytest.param("grpc,ttft,requests,memory", marks=pytest.mark.slow)], ids=str
)
def test_it_measures_each_case(cases: str) -> None:
    command = [sys.executable, "-m", "bench.router", "--cases", cases, *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {case["case"].partition("_")[0] for case in found} == set(cases.split(","))
    assert all(case["failed"] == 0 and case["yardstick_us"] > 0 for case in found)
    assert all(case["tokens_s"] > 0 for case in found if case["case"] in ("grpc", "sse"))
