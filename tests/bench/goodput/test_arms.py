"""Arms as they are named, the GPUs that they take, and what their servers are started with."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.base.process_stat import is_running
from bench.goodput.arms import WORKLOADS, Arm, parse_arm
from bench.goodput.runs import Limits, Load
from bench.goodput.servers import GpuPool, NotServedError, Setup, Target, serve, visible_gpus
from bench.model_folders import write_random_model, write_word_tokenizer


@pytest.mark.parametrize(
    ("text", "arm", "gpus"),
    [
        ("vllm", Arm("vllm", "vllm"), 1),
        ("v=vllm --seed 1", Arm("v", "vllm", flags=("--seed", "1")), 1),
        ("v=vllm@http://[::1]:8000", Arm("v", "vllm", url="http://[::1]:8000"), 1),
        ("both", Arm("both", "baton", both=1), 1),
        ("2both", Arm("2both", "baton", both=2), 2),
        ("1p2both", Arm("1p2both", "baton", prefill=1, both=2, flags=("--both-receives",)), 3),
        ("3p1d", Arm("3p1d", "baton", prefill=3, decode=1), 4),
        (
            "q=1p1d --quantization fp8",
            Arm("q", "baton", prefill=1, decode=1, flags=("--quantization", "fp8")),
            2,
        ),
        (
            "1p1d --tensor-parallel 2",
            Arm("1p1d", "baton", prefill=1, decode=1, flags=("--tensor-parallel", "2")),
            4,
        ),
    ],
)
def test_arms(text: str, arm: Arm, gpus: int) -> None:
    assert parse_arm(text) == arm
    assert arm.gpus == gpus


@pytest.mark.parametrize(
    "text", ["", "p1d", "0p1d", "1p0d", "0both", "sglang", "x=", "1p1d=2x", "both@http://a"]
)
def test_what_is_no_arm(text: str) -> None:
    with pytest.raises(ValueError, match="arm"):
        parse_arm(text)


@pytest.mark.parametrize("count", ["", " two", " 0"])
def test_devices_of_a_worker_are_a_number(count: str) -> None:
    with pytest.raises(ValueError, match=r"--tensor-parallel.*devices of a worker are a number above 0"):
        parse_arm(f"both --tensor-parallel{count}")


def test_roles_are_flags_of_baton_up() -> None:
    assert parse_arm("2p1d").roles == ("--prefill", "2", "--decode", "1")
    assert parse_arm("both").roles == ("--both", "1")


async def test_arms_wait_for_gpus_of_their_own() -> None:
    pool, running, most = GpuPool(["0", "1", "2"]), set[str](), 0

    async def arm(count: int) -> None:
        nonlocal most
        async with pool.take(count) as taken:
            assert len(taken) == count
            assert not running & set(taken)
            running.update(taken)
            most = max(most, len(running))
            await asyncio.sleep(0)
            running.difference_update(taken)

    async with asyncio.timeout(5):
        await asyncio.gather(*(arm(count) for count in (2, 2, 1, 3, 1)))
    assert most == 3


def test_visible_gpus_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert visible_gpus() == ["3", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


async def test_an_arm_whose_server_is_not_there(tmp_path: Path) -> None:
    setup = Setup("tiny", "fp32", "cpu", 64, "no-such-program", tmp_path)
    with pytest.raises(NotServedError, match="there is no no-such-program"):
        async with serve(parse_arm("vllm"), setup, ["0"]):
            pass
    false = Setup("tiny", "fp32", "cpu", 64, "false", tmp_path)
    with pytest.raises(NotServedError, match="it ended with 1 before it was ready"):
        async with serve(parse_arm("vllm"), false, ["0"]):
            pass


async def test_an_arm_that_runs_already_is_not_started(tmp_path: Path) -> None:
    setup = Setup("tiny", "fp32", "cpu", 64, "no-such-python", tmp_path)
    async with serve(parse_arm("v=vllm@http://a:1"), setup, ["0"]) as target:
        assert target == Target("http://a:1")
    assert not (tmp_path / "v").exists()


def test_a_comparison_that_is_terminated_leaves_no_server(tmp_path: Path) -> None:
    """vLLM in place of itself: a program that never answers."""
    started, server = tmp_path / "started", tmp_path / "vllm"
    server.write_text(f"#!/bin/sh\necho $$ > {started}.new; mv {started}.new {started}; exec sleep 60\n")
    server.chmod(0o755)
    command = [
        sys.executable, "-m", "bench.goodput", "--arm", "vllm", "--vllm", str(server), "--shape", "tiny",
        "--device", "cpu", "--rates", "1", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        deadline = time.monotonic() + 60
        while not started.exists():
            assert time.monotonic() < deadline
            assert program.poll() is None
            time.sleep(0.05)
        pid = int(started.read_text())
        assert is_running(pid)
        program.terminate()
        _, said = program.communicate(timeout=60)
    assert program.returncode == 1
    assert said.endswith("bench.goodput: terminated\n")
    assert not is_running(pid)


def test_token_i_is_word_i_for_every_server(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    model = write_random_model(tmp_path, "tiny", 64)
    write_word_tokenizer(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.decode([5, 0, 90]) == "w5 w0 w90"
    assert tokenizer.encode("w5 w0 w90").ids == [5, 0, 90]


def test_the_words_of_a_run() -> None:
    load = Load(WORKLOADS["chat"], 10.0, 30.0, 7, Limits(500, 6, 0.9))
    words = load.words(Target("grpc://a:1", "a:2"), Path("out"), 256)
    assert words[:2] == ["run", "grpc://a:1"]
    assert words[words.index("--rate") + 1] == "2", "of conversations, each of five turns"
    assert words[words.index("--goodput") + 1 :][:3] == ["ttft:500", "tpot:6", "--slo-headers"]
    without = Load(WORKLOADS["1k-256"], 10.0, 30.0, 7).words(Target("http://a:1"), Path("out"), 256)
    assert "--admin" not in without
    assert "--goodput" not in without
