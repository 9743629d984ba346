"""The program that measures the cluster's own cost runs, and says what it promises to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHORT = ["--rounds", "1", "--requests", "1", "--output-len", "20", "--json"]


@pytest.mark.slow
@pytest.mark.parametrize("streams", [[3], [1, 3]], ids=str)
def test_it_measures_each_case(streams: list[int]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.cluster.__main__", "--streams", ",".join(map(str, streams)), *SHORT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(case["streams"], case["requests"]) for case in cases] == [(one, one) for one in streams]
    for case in cases:
        assert case["tokens_a_message"] >= 1
        assert min(case["ttft_ms"], case["ttft_alone_ms"]) > 0
        assert case["ring_to_client_ms_p99"] >= case["ring_to_client_ms_p50"] > 0
        assert {"tpot_added_ms", "ttft_added_ms"} <= case.keys()
