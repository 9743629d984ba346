"""The program that measures links runs, and says what it promises to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def cases(*arguments: str, transport: str = "grpc") -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.transfer.__main__", "--transport", transport, "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("transport", [pytest.param("grpc", marks=pytest.mark.slow), "ipc"])
def test_between_two_processes(transport: str) -> None:
    small, larger = cases("--mb", "1,8", "--rounds", "1", transport=transport)
    for case, megabytes in ((small, 1), (larger, 8)):
        assert (case["transport"], case["mb"]) == (transport, megabytes)
        assert case["gb_s"] > 0
        assert case["raw_gb_s"] > 0
