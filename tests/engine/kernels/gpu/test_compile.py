"""Kernels compile for a GPU on machines without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[4] / "tools" / "compile_kernels.py"


@pytest.mark.slow
def test_attention_of_several_rows_compiles_for_hopper() -> None:
    """And leaves room for the programs that its tuning counts on."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, TOOL, "--attention", "--shapes", "8B,wide", "--json"],
        env=environment | {"PYTHONPATH": str(TOOL.parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    rows = [one for one in found if one["name"] == "_slot_attention"]
    assert {tuple(one["of"].split(", ")[:2]) for one in rows} == {
        (shape, cache) for shape in ("8B", "wide") for cache in ("bf16", "codes", "fp32")
    }
    assert max(one["shared"] for one in found if one["of"].startswith("8B, bf16")) < 100_000
