"""`bench.cluster gpu` with a tiny model on a CPU: every topology is started, measured and stopped."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("topology", "transport", "taken"),
    [("shared", "auto", ["ipc"]), ("both", "auto", []), ("apart", "grpc", ["grpc"])],
)
def test_every_load_is_reported(topology: str, transport: str, taken: list[str]) -> None:
    command = [
        sys.executable, "-m", "bench.cluster", "gpu", "--topology", topology, "--transport", transport,
        "--streams", "1,3", "--prompts", "90,30", "--output-len", "30", "--requests", "2", "--handoffs", "80",
        "--burst-output", "400", "--shape", "tiny", "--dtype", "fp32", "--device", "cpu", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    reported = [json.loads(line) for line in done.stdout.splitlines()]
    bursts = [one for one in reported if one["load"] == "burst"]
    loops = [one for one in reported if one["load"] == "loop"]
    assert [one["streams"] for one in bursts] == [1, 3]
    assert all(one["tpot_ms"] > 0 and one["engine"]["steps"] > 0 for one in bursts)
    assert [(one["prompt"], one["streams"]) for one in loops] == [(90, 1), (90, 3), (30, 1), (30, 3)]
    (alone,) = [one for one in reported if one["load"] == "handoff"]
    assert alone["prompt"] == 80
    assert 0 < alone["exposed_p50_ms"] <= alone["exposed_p99_ms"]
    assert all(one["ok"] == 2 * one["streams"] and not one["failed"] for one in loops)
    (links,) = [one for one in reported if one["load"] == "links"]
    assert links["transports"] == taken
    assert links["handoffs"] > sum(one["ok"] for one in loops)
    assert links["fell"] == links["broken"] == links["checksum_failures"] == 0
    assert bool(links["received_gb"]) == bool(taken)
