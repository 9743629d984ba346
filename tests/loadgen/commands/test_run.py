"""`loadgen run` as a user runs it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from loadgen.analysis import run_folder
from loadgen.cli import main
from loadgen.commands import flags, run, search, sweep
from loadgen.generator.worker import Assignment, pin_to_cpu
from loadgen.load.sources import workload_of
from loadgen.reports.descriptions import load_words
from tests.loadgen.builders import settings
from tests.loadgen.fake_server import Behaviour
from tests.loadgen.processes import MAY_LAG, Serve, loadgen


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_run(serve: Serve, protocol: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Too few for a backlog that a busy machine makes to be judged.
    with serve(Behaviour(faults=("ok", "ok", "ok", "busy"), first_s=0.01)) as served:
        done = loadgen(
            *("run", getattr(served, protocol), "--model", "m", "--rate", "40", "--num-requests", "36"),
            *("--output-len", "5", "--warmup", "0", "--processes", "2", "--max-error-share", "0.5"),
            *("--goodput", "ttft:60000", *MAY_LAG, "--json", "--out", str(out)),
        )
        assert done.code == 1, done.err
        report = done.json
    failure = "RESOURCE_EXHAUSTED" if protocol == "grpc" else "HTTP_429"
    # Two requests were the preflight's.
    lines = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 36
    assert sum(line["outcome"] == failure for line in lines) == 9
    assert sorted(line["conversation"] for line in lines) == list(range(36))
    assert {line["process"] for line in lines} == {0, 1}
    assert all(len(line["token_times"]) == 5 for line in lines if line["outcome"] == "OK")
    assert report["valid"] is True
    assert report["failed"][failure] == report["due"] - report["ok"]
    assert report["attainment"]["share"]["value"] == pytest.approx(report["ok"] / report["due"])
    assert report["settings"]["load"]["rate"] == 40
    for process in report["generator"]["processes"]:
        assert process["throttled_ms"]["max"] >= process["throttled_ms"]["p99"] >= 0
        assert process["throttled"].keys() == {"times", "seconds"}
    emitted = served.emitted()
    assert {line["request_id"] for line in lines if line["outcome"] == "OK"} <= set(emitted)
    # The folder says the same again.
    again = json.loads(json.dumps(run_folder.load(out).as_dict()))
    assert again == report


@pytest.mark.parametrize(("command", "needed"), [(run, []), (search, []), (sweep, ["--rates", "1"])])
def test_each_run_has_prompts_of_its_own(command: ModuleType, needed: list[str]) -> None:
    """Unless a seed is given, which the settings, and so the report, have."""
    parser = argparse.ArgumentParser()
    command.add(parser)
    sent = []
    for more in ([], [], ["--seed", "7"], ["--seed", "7"]):
        arguments = parser.parse_args(["grpc://127.0.0.1:1", *needed, *more])
        wanted = flags.settings_of(arguments, {"rate": 1.0, "duration_s": 1.0})
        conversation = workload_of(wanted).conversation(0)
        assert conversation is not None
        sent.append((wanted.load.seed, tuple(conversation.turns[0].content)))
        assert f"seed {wanted.load.seed}" in load_words(wanted.load)
    assert sent[0] != sent[1]
    assert sent[2] == sent[3]
    assert sent[2][0] == 7


def test_exit_codes(serve: Serve, tmp_path: Path) -> None:
    common = ("--model", "m", "--num-requests", "5", "--rate", "50", *MAY_LAG)
    with serve(Behaviour(faults=("ok", "ok", "down"))) as served:
        invalid = loadgen("run", served.grpc, *common, "--warmup", "0", "--out", str(tmp_path / "a"))
    assert invalid.code == 3
    assert "INVALID" in invalid.out
    assert "UNAVAILABLE" in invalid.out
    unreachable = loadgen("run", served.http, *common, "--out", str(tmp_path / "b"))
    assert unreachable.code == 2
    assert unreachable.err == f"loadgen: error: no answer from {served.http} (ConnectionRefusedError)\n"
    assert unreachable.out == ""


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
        ["--processes", "2", "--cpus", "0"],
    ],
)
def test_absurd_flags(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "grpc://127.0.0.1:1", "--model", "m", "--out", str(tmp_path / "x"), *flags]) == 2
    reported = capsys.readouterr()
    assert reported.out == ""
    assert reported.err.startswith("loadgen: error: ")
    assert reported.err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_missing_pyarrow_is_reported_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["run", "grpc://127.0.0.1:1", "--parquet", "--out", str(tmp_path / "x")]) == 2
    assert "parquet needs pyarrow" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_processor_that_is_not_there(serve: Serve, tmp_path: Path) -> None:
    with serve(Behaviour()) as served:
        done = loadgen("run", served.http, "--num-requests", "2", "--cpus", "100000", "--out", str(tmp_path))
    assert done.code == 2
    assert done.err.endswith("loadgen: error: --cpus: no process of ours may run on 100000\n")


def test_each_process_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, set[int]]] = []
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cpus: asked.append((pid, cpus)))
    wanted = settings(generator={"processes": 2, "cpus": (4, 7)})
    for number in range(2):
        pin_to_cpu(Assignment(settings=wanted, process=number, of=2, records=""))
    pin_to_cpu(Assignment(settings=settings(), process=0, of=1, records=""))
    assert asked == [(0, {4}), (0, {7})]


def test_a_folder_with_a_run_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.json").write_text("{}")
    assert main(["run", "grpc://127.0.0.1:1", "--model", "m", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"loadgen: error: {tmp_path} contains a run already\n"


def test_an_interrupted_run_keeps_what_it_has(serve: Serve, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "loadgen", "run"]
    with serve(Behaviour()) as served:
        flags = [
            "--rate",
            "50",
            "--duration",
            "60",
            "--output-len",
            "2",
            *MAY_LAG,
            "--out",
            str(out),
        ]
        with subprocess.Popen([*command, served.grpc, *flags], stdout=subprocess.PIPE, text=True) as process:
            part = out / "part-0.jsonl"
            until = time.monotonic() + 60
            while not (part.exists() and part.stat().st_size) and time.monotonic() < until:
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            reported, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "the run was stopped before its end" in reported
    assert len((out / "requests.jsonl").read_text().splitlines()) > 0
    assert not part.exists()


def test_a_process_of_the_generator_that_dies_is_reported(serve: Serve, tmp_path: Path) -> None:
    """And its part of the record stays."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "loadgen", "run"]
    with serve(Behaviour()) as served:
        flags = ["--rate", "50", "--duration", "60", "--output-len", "2", "--out", str(out)]
        with subprocess.Popen([*command, served.grpc, *flags], stderr=subprocess.PIPE, text=True) as process:
            part = out / "part-0.jsonl"
            until = time.monotonic() + 60
            while not (part.exists() and part.stat().st_size) and time.monotonic() < until:
                time.sleep(0.1)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert len(children) == 1
            os.kill(int(children[0]), signal.SIGKILL)
            _, reported = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "a process of the generator ended by itself (exit code -9)" in reported
    assert part.read_text().count('"outcome":"OK"') > 0


@pytest.mark.slow
def test_a_search(serve: Serve, tmp_path: Path) -> None:
    """The whole command on a queue in real time; how near it comes is the slow proof's business."""
    with serve(Behaviour(service_s=(0.02,), gap_s=0.0)) as served:
        done = loadgen(
            *("search", served.grpc, "--budget", "10", "--start-rate", "20", "--output-len", "2"),
            *("--goodput", "e2el:150", *MAY_LAG, "--json", "--out", str(tmp_path / "s")),
        )
    assert done.code in (0, 1), done.err
    found = done.json
    rates = [point["probe"]["rate"] for point in found["points"]]
    assert rates == sorted(rates)
    assert found["seconds"] < 60
    assert {point["probe"]["verdict"] for point in found["points"]} <= {"pass", "fail", "unstable"}
    for point in found["points"]:
        assert (tmp_path / "s" / point["folder"] / "requests.jsonl").exists()
    assert (tmp_path / "s" / "report.html").exists()


def test_a_search_needs_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "grpc://127.0.0.1:1"]) == 2
    assert "must define a good request" in capsys.readouterr().err


def test_a_sweep_with_the_served_model(serve: Serve, tmp_path: Path) -> None:
    with serve(Behaviour()) as served:
        done = loadgen(
            *("sweep", served.http, "--rates", "20", "40", "--duration", "1", "--output-len", "3"),
            *("--goodput", "ttft:1000", *MAY_LAG, "--json", "--out", str(tmp_path / "s"), "--parquet"),
        )
    assert done.code == 0, done.err
    for point in done.json["points"]:
        assert (tmp_path / "s" / point["folder"] / "requests.parquet").exists()
    assert [point["probe"]["rate"] for point in done.json["points"]] == [20.0, 40.0]
    kept = json.loads((tmp_path / "s" / done.json["points"][0]["folder"] / "settings.json").read_text())
    assert kept["target"]["model"] == "fake"
    assert kept["load"]["duration_s"] == 1.0


def test_conversations_over_http_as_chats(serve: Serve, tmp_path: Path) -> None:
    """Text of a known length, answers in the next prompt, a server without extensions."""
    with serve(Behaviour(extensions=False, tokens_a_prompt=4)) as served:
        done = loadgen(
            *(
                "run",
                served.http,
                "--form",
                "chat",
                "--dataset",
                "chat",
                "--turns",
                "2",
                "--think-time",
                "0.01",
            ),
            *("--rate", "20", "--num-requests", "10", "--input-len", "12", "--output-len", "3"),
            *(*MAY_LAG, "--json", "--out", str(tmp_path / "c")),
        )
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "c" / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 20
    assert done.json["settings"]["target"]["extensions"] == "none"
    first = [line for line in lines if line["turn"] == 0]
    assert {(line["asked_input"], line["usage_input"]) for line in first} == {(12, 12)}
    # Eight words, three of the answer, eight words, and what a prompt costs beside.
    assert {line["usage_input"] for line in lines if line["turn"] == 1} == {23}


def test_a_trace_and_leaving_clients(serve: Serve, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    one = {"input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
    trace.write_text("\n".join(json.dumps(one | {"timestamp": n * 100}) for n in range(30)))
    with serve(Behaviour(first_s=0.3)) as served:
        done = loadgen(
            *("run", served.grpc, "--trace", str(trace), "--speed", "5", "--cancel-share", "0.5"),
            *("--cancel-after", "0.05", *MAY_LAG, "--json", "--out", str(tmp_path / "t")),
        )
    assert done.code == 0, done.err
    report = done.json
    assert (report["planned"], report["ok"] + report["cancelled"]) == (30, 30)
    assert 5 <= report["cancelled"] <= 25
    assert report["cautions"] == ["the load changes over time by design: the whole run is summed up"]


@pytest.mark.parametrize("protocol", ["grpc", pytest.param("http", marks=pytest.mark.slow)])
def test_every_way_to_fail_is_counted_as_what_it_was(serve: Serve, protocol: str, tmp_path: Path) -> None:
    """A server that does everything wrong in turn; the run goes on and ends in time."""
    ways = ("hang", "reset", "no_finish", "busy", "down", "malformed", "stream_error", "late_reset", "ok")
    with serve(Behaviour(faults=("ok", "ok", *ways))) as served:
        began = time.monotonic()
        done = loadgen(
            *("run", getattr(served, protocol), "--model", "m", "--rate", "50", "--num-requests", "99"),
            *("--output-len", "3", "--warmup", "0", "--timeout", "3", *MAY_LAG, "--json"),
            *("--goodput", "ttft:60000", "--out", str(tmp_path / "f")),
        )
        took = time.monotonic() - began
    assert done.code == 3
    assert took < 60
    lines = [json.loads(line) for line in (tmp_path / "f" / "requests.jsonl").read_text().splitlines()]
    outcomes = Counter(line["outcome"] for line in lines)
    # Two of eleven in a turn are well; the preflight had the first two of the first turn.
    if protocol == "grpc":
        kinds = {
            "TIMEOUT": 1,
            "UNAVAILABLE": 4,
            "NO_FINISH": 1,
            "RESOURCE_EXHAUSTED": 1,
            "MALFORMED": 1,
            "OK": 3,
        }
    else:
        kinds = {
            **{"TIMEOUT": 1, "RESET": 2, "NO_FINISH": 1, "HTTP_429": 1, "HTTP_503": 1},
            **{"MALFORMED": 1, "STREAM_ERROR": 1, "OK": 3},
        }
    assert outcomes == {kind: 9 * count for kind, count in kinds.items()}
    assert any(reason["kind"] == "errors" for reason in done.json["invalid"])
    assert done.json["attainment"]["share"]["value"] == pytest.approx(3 / 11, abs=0.05)
