"""Kernels compile for a GPU on machines without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[4] / "tools" / "compile_kernels.py"


def compiled(*options: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, TOOL, *options, "--json"],
        env=environment | {"PYTHONPATH": str(TOOL.parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
def test_experts_compile_for_hopper() -> None:
    """Kernels in half precision compile without spilled registers: their tiles are chosen for that."""
    found = compiled("--experts")
    names = "_route route_row _gate_up _add_down _align _grouped _grouped_codes _quantize _combine"
    assert {one["name"] for one in found} == set(names.split())
    spilled = [one for one in found if one["spilled"]]
    assert all("float32" in one["of"] for one in spilled), spilled


@pytest.mark.slow
def test_attention_of_several_rows_compiles_for_hopper() -> None:
    """And leaves room for the programs that its tuning counts on. In one shape an item's queries fill a tile
    of 32: Triton's interpreter does not see where a variable changes its shape."""
    shapes = "8B", "wide", "28 and 4"
    found = compiled("--attention", "--shapes", ",".join(shapes))
    rows = [one for one in found if one["name"] == "_slot_attention"]
    assert {tuple(one["of"].split(", ")[:2]) for one in rows} == {
        (shape, cache) for shape in shapes for cache in ("bf16", "codes", "fp32")
    }
    assert max(one["shared"] for one in found if one["of"].startswith("8B, bf16")) < 100_000


@pytest.mark.slow
def test_whole_steps_compile_for_hopper() -> None:
    """Steps with drafts and without, both samplers, values and codes in the cache."""
    found = compiled("--steps")
    for dtype in ("bfloat16", "float8_e4m3fn"):
        names = {one["name"] for one in found if one["of"] == f"a step, {dtype}"}
        assert names >= {"_split_attention", "_slot_attention"}
    others = "begin", "plan_items", "_skinny", "_gemv", "_draw", "_add_drafts", "_accept_rows", "finish"
    assert {one["name"] for one in found} >= set(others)
