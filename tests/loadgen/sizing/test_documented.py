"""Sizes that docs/sizing.md shows are those of `loadgen size`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from baton.perf_model.profile import Profile
from loadgen.cli import main

PAGE = (Path(__file__).parents[3] / "docs" / "sizing.md").read_text(encoding="utf-8")


def test_the_example_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command, _, shown = PAGE.partition("```console\n$ loadgen ")[2].partition("```")[0].partition("\n")
    assert main(shlex.split(command)) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown.splitlines() == printed


def test_the_table_is_what_the_command_computes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(
        r"^\| ([\d,]+), ([\d,]+) \| (\d+), (\d+) ms \| (\d+) \| (\d+) \| ([\d.]+) \|$", PAGE, re.M
    )
    assert len(rows) >= 5
    for prompt, output, ttft, tpot, prefill, decode, each in rows:
        lengths = ["--input-len", prompt.replace(",", ""), "--output-len", output.replace(",", "")]
        limits = ["--goodput", f"ttft:{ttft}", f"tpot:{tpot}"]
        assert main(["size", "8b-h100", "--rates", "100", *lengths, *limits, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)["plans"][0]
        assert (plan["prefill"], plan["decode"]) == (int(prefill), int(decode))
        assert 100 / plan["gpus"] == pytest.approx(float(each), rel=0.01)


def test_the_documented_file_is_a_valid_one() -> None:
    Profile.model_validate(yaml.safe_load(PAGE.partition("```yaml\n")[2].partition("```")[0]))
