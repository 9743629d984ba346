"""`loadgen size` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from baton.perf_model.profile import read_profile, shipped
from loadgen.cli import main

WANTED = ["--rates", "10", "100", "--input-len", "1024", "--output-len", "256"]
LIMITS = ["--goodput", "ttft:500", "tpot:12"]


def test_prints_a_row_for_each_rate_within_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["size", "8b-h100", *WANTED, *LIMITS, "--spare", "1"]) == 0
    out = capsys.readouterr().out
    assert "bench/LOG-2026-11.md" in out
    assert "…" not in out
    rows = [line.split() for line in out.splitlines() if line.strip().endswith(("TPOT", "memory", "batch"))]
    assert [row[0] for row in rows] == ["10.0", "100"]
    assert rows[1][1].endswith("+1")


def test_json_has_the_whole_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "8b-h200", *WANTED, "--preset", "mlperf-llama3.1-8b-interactive", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["load"]["attainment"] == 0.99
    assert [plan["rate"] for plan in document["plans"]] == [10, 100]
    assert document["plans"][1]["gpus"] == document["plans"][1]["prefill"] + document["plans"][1]["decode"]


@pytest.mark.parametrize("name", shipped())
def test_shipped_profiles_name_a_source_that_exists(name: str) -> None:
    profile = read_profile(name)
    file, _, rest = profile.source.partition(", ")
    assert file.startswith("bench/LOG")
    log = (Path(__file__).parents[3] / file).read_text(encoding="utf-8")
    assert f"## {rest.partition(' of ')[2][:10]}" in log


def test_a_profile_of_ones_own_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = read_profile("8b-h100").model_dump() | {"model": "mine"}
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(own), encoding="utf-8")
    assert main(["size", str(file), *WANTED, *LIMITS]) == 0
    assert capsys.readouterr().out.startswith("mine on H100")


def test_decode_workers_may_have_a_profile_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prefill workers of two GPUs, as a profile of theirs says."""
    two = tmp_path / "two.yaml"
    two.write_text(
        yaml.safe_dump(read_profile("8b-h200").model_dump() | {"worker_gpus": 2}), encoding="utf-8"
    )
    own = ["--decode-profile", "8b-h200"]
    assert main(["size", str(two), *own, *WANTED, *LIMITS]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert " on 2 x " in first
    assert second.startswith("decode: ")
    assert " on 2 x " not in second
    assert main(["size", str(two), *own, *WANTED, *LIMITS, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["profile"]["worker_gpus"], document["decode_profile"]["worker_gpus"]) == (2, 1)
    for found in document["plans"]:
        assert found["gpus"] == 2 * found["prefill"] + found["decode"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", *WANTED, *LIMITS], "shipped profiles"),
        (["8b-h100", *WANTED], "ttft and tpot"),
        (["8b-h100", *WANTED, "--goodput", "ttft:500", "tpot:12", "itl_p99:50"], "no others"),
        (["8b-h100", *WANTED, "--goodput", "ttft:5", "tpot:12"], "ttft:5"),
        (["8b-h100", *WANTED, *LIMITS, "--attainment", "1"], "--attainment"),
        (["8b-h100", *WANTED, *LIMITS, "--prefix-hits", "1"], "--prefix-hits"),
        (["8b-h100", *WANTED, *LIMITS, "--spare", "-1"], "--spare"),
        (["8b-h100", *WANTED, *LIMITS, "--decode-profile", "8b-h100-fp8"], "kv_bytes_per_token is 131072 in"),
        (["8b-h100", *WANTED, *LIMITS, "--decode-profile", "nowhere"], "shipped profiles"),
        (["8b-h100", *WANTED, *LIMITS, "--input-cv", "-1"], "--input-cv"),
        (["8b-h100", "--rates", "0", *WANTED[3:], *LIMITS], "--rates"),
        (["8b-h100", "--rates", "1", "--input-len", "0", "--output-len", "1", *LIMITS], "--input-len"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefill_ms": {1024: 24}}, "prefill_ms: .*two points"),
        ({"decode_step_ms": {1: 5, 8: 4}}, "decode_step_ms: .*must not fall"),
        ({"kv_gb": 0}, "kv_gb"),
        ({"kv_read_gb_s": 0.01}, "kv_read_gb_s"),
        ({"gpus": 8}, "gpus"),
    ],
)
def test_wrong_profiles_name_their_key(
    changes: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(read_profile("8b-h100").model_dump() | changes), encoding="utf-8")
    assert main(["size", str(file), *WANTED, *LIMITS]) == 2
    err = capsys.readouterr().err
    assert words.rpartition(".*")[2] in err
    assert err.count("\n") == 1


def test_a_file_that_is_no_yaml_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("{prefill_ms: [", encoding="utf-8")
    assert main(["size", str(file), *WANTED, *LIMITS]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_tokens_a_step_may_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["size", "8b-h200", *WANTED, *LIMITS, "--json", "--tokens-per-step"]
    assert main([*arguments, "1.6"]) == 0
    assert json.loads(capsys.readouterr().out)["profile"]["tokens_a_step"] == 1.6
    assert main([*arguments, "0.9"]) == 2
    assert "--tokens-per-step must lie between 1 and 8" in capsys.readouterr().err
