"""`loadgen run` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen import run_folder
from loadgen.cli import main
from tests.loadgen.conftest import Serve, loadgen
from tests.loadgen.fake_server import Behaviour


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_a_run(serve: Serve, door: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serve(Behaviour(faults=("ok", "ok", "ok", "busy"), first_s=0.01)) as served:
        done = loadgen(
            *("run", getattr(served, door), "--model", "m", "--rate", "100", "--num-requests", "80"),
            *("--output-len", "5", "--warmup", "0", "--processes", "2", "--max-error-share", "0.5"),
            *("--goodput", "ttft:60000", "--max-lag-ms", "60000", "--json", "--out", str(out)),
        )
        assert done.code == 1, done.err
        report = done.json
    failure = "RESOURCE_EXHAUSTED" if door == "grpc" else "HTTP_429"
    # Two requests were the preflight's.
    lines = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 80
    assert sum(line["outcome"] == failure for line in lines) == 20
    assert sorted(line["conversation"] for line in lines) == list(range(80))
    assert {line["process"] for line in lines} == {0, 1}
    assert all(len(line["token_times"]) == 5 for line in lines if line["outcome"] == "OK")
    assert report["valid"] is True
    assert report["failed"][failure] == report["due"] - report["ok"]
    assert report["attainment"]["share"]["value"] == pytest.approx(report["ok"] / report["due"])
    assert report["settings"]["load"]["rate"] == 100
    emitted = served.emitted()
    assert {line["request_id"] for line in lines if line["outcome"] == "OK"} <= set(emitted)
    # The folder says the same again.
    again = json.loads(json.dumps(run_folder.load(out).as_dict()))
    assert again == report


def test_exit_codes(serve: Serve, tmp_path: Path) -> None:
    common = ("--model", "m", "--num-requests", "5", "--rate", "50", "--max-lag-ms", "60000")
    with serve(Behaviour(faults=("ok", "ok", "down"))) as served:
        invalid = loadgen("run", served.grpc, *common, "--warmup", "0", "--out", str(tmp_path / "a"))
    assert invalid.code == 3
    assert "INVALID" in invalid.out
    assert "UNAVAILABLE" in invalid.out
    nobody = loadgen("run", served.http, *common, "--out", str(tmp_path / "b"))
    assert nobody.code == 2
    assert nobody.err == f"loadgen: error: nobody answers at {served.http} (ConnectionRefusedError)\n"
    assert nobody.out == ""


@pytest.mark.parametrize(
    "flags",
    [
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--num-requests", "-1"],
        ["--input-len", "x"],
        ["--goodput", "ttft"],
        ["--goodput", "speed:3"],
        ["--stages", "5"],
        ["--extra-body", "{"],
        ["--seed", "-1"],
        ["--rate", "1", "--burstiness", "0"],
        ["--attainment", "1"],
    ],
)
def test_absurd_flags(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "grpc://127.0.0.1:1", "--model", "m", "--out", str(tmp_path / "x"), *flags]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("loadgen: error: ")
    assert told.err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_folder_with_a_run_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.json").write_text("{}")
    assert main(["run", "grpc://127.0.0.1:1", "--model", "m", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"loadgen: error: {tmp_path} holds a run already\n"
