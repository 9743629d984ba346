"""An arm at rates of its own under each limit: what is asked for, and what is reported of it."""

from __future__ import annotations

import contextlib
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from bench.goodput import points as program
from bench.goodput.arms import Arm, parse_arm
from bench.goodput.points import loads, parse_points, run
from bench.goodput.runs import Limits, Load
from bench.goodput.servers import Setup, Target
from loadgen.analysis.run_folder import Run
from tests.bench.goodput.test_report import run_at


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1k-256:6", r"is not WORKLOAD:TPOT:RATES\[:SECONDS\] with a workload of 1k-256, 4k-256"),
        ("5k:6:9", "is not WORKLOAD:TPOT:RATES"),
        ("1k-256:six:9", "are numbers"),
        ("1k-256:6:", "at least one rate"),
        ("1k-256:6:9,0", "above 0"),
        ("1k-256:6:9:0", "above 0"),
        ("1k-256:6:9:long", "are numbers"),
        ("1k-256:6:9:60:1", "is not WORKLOAD:TPOT:RATES"),
    ],
)
def test_points_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_points(text)


def arguments(out: Path | None = None, *, unstated: bool = False) -> Namespace:
    return Namespace(
        arm=parse_arm("2p2d"), points=[parse_points("1k-256:6:9,10"), parse_points("4k-256:30:5:180")],
        ttft=500.0, attainment=0.9, seconds=45.0, seed=7, processes=4, unstated=unstated, shape="tiny",
        dtype="fp32", device="cpu", vllm="", vllm_site="", protocol="http", text="", new_share=0.0, out=out,
    )  # fmt: skip


@pytest.mark.parametrize("unstated", [False, True])
def test_every_run_has_its_limit_and_a_seed_of_its_own(*, unstated: bool) -> None:
    given = arguments(unstated=unstated)
    found = list(loads(given.arm, given.points, given))
    six, thirty = Limits(500.0, 6.0, 0.9), Limits(500.0, 30.0, 0.9)
    assert [(rate, limits) for rate, limits, _ in found] == [(9.0, six), (10.0, six), (5.0, thirty)]
    runs = [load for _, _, load in found]
    assert [(one.rate, one.seed, one.workload.name) for one in runs] == [
        (36.0, 7, "1k-256"),
        (40.0, 1007, "1k-256"),
        (20.0, 2007, "4k-256"),
    ]
    assert [one.slo for one in runs] == ([None] * 3 if unstated else [six, six, thirty])
    words = runs[0].words(Target("http://x"), Path("out"), 256)
    assert words[words.index("--warmup") + 1] == "24"


async def test_an_arm_without_its_server_is_named() -> None:
    given = arguments()
    given.arm, given.vllm = parse_arm("vllm"), "/nonexistent/python"
    assert await run(given) == "bench.goodput points: vllm: there is no /nonexistent/python"


async def test_lines_of_one_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    @contextlib.asynccontextmanager
    async def serve(arm: Arm, setup: Setup, gpus: Sequence[str]) -> AsyncIterator[Target]:
        started.append((arm.name, setup.tokens))
        yield Target("x")

    async def measure(load: Load, target: Target, folder: Path, vocab: int) -> Run:
        return run_at(folder, load.rate, 8.0)

    monkeypatch.setattr(program, "serve", serve)
    monkeypatch.setattr(program, "measure", measure)
    out = tmp_path / "out" / "found.jsonl"
    assert await run(arguments(out)) is None
    assert started == [("2p2d", 4354)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2p2d 1k-256 6 ms: asked 9, arrived 9")
    assert [": 0.0% of" in line for line in lines] == [True, True, False]
    assert lines[2].startswith("2p2d 4k-256 30 ms: asked 5, arrived 5")
    assert ": 100.0% of" in lines[2]
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["tpot_ms"], one["asked"], one["attainment"]) for one in found] == [
        (6.0, 9.0, 0.0),
        (6.0, 10.0, 0.0),
        (30.0, 5.0, 1.0),
    ]
