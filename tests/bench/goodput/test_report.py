"""Runs are judged under each limit, and arms shown beside one another, skipped ones with the reason."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import xml.etree.ElementTree
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from baton.perf_model.profile import read_profile
from bench.goodput import __main__ as program
from bench.goodput.__main__ import Plan, compare
from bench.goodput.arms import WORKLOADS, Arm, parse_arm
from bench.goodput.report import Comparison, Curve, compared, write_arms
from bench.goodput.runs import Limits, Load, judged
from bench.goodput.servers import NotServedError, Setup, Target
from loadgen.analysis import run_folder
from loadgen.analysis.run_folder import Run
from loadgen.common.record import Measured, Record
from loadgen.common.settings import LoadSettings, Settings, TargetSettings

LIMITS = tuple(Limits(500, tpot, 0.9) for tpot in (6, 12))


def run_at(folder: Path, rate: float, tpot_ms: float, requests: int = 400) -> Run:
    """A run whose requests are evenly spaced, with this TPOT."""
    folder.mkdir(parents=True)
    settings = Settings(
        target=TargetSettings(url="grpc://x:1"), load=LoadSettings(rate=rate, duration_s=requests / rate)
    )
    records = []
    for number in range(requests):
        due = number / rate
        times = [due + 0.1 + token * tpot_ms / 1e3 for token in range(11)]
        records.append(
            Record(
                number,
                0,
                "default",
                due,
                1024,
                11,
                sent=due,
                token_times=times,
                ended=times[-1],
                outcome="OK",
            )
        )
    measured = Measured(records, 0.0, 0.0, [], stopped=False)
    return run_folder.keep(folder, settings, measured, {})


def test_one_run_is_judged_under_every_limit(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run", 20.0, 8.0)
    assert [judged(run, 20.0, limits).attainment for limits in LIMITS] == [0.0, 1.0]
    assert judged(run, 20.0, Limits(90, 12, 0.9)).attainment == 0.0


def test_a_line_goes_from_rate_to_rate_though_others_arrived_than_were_asked_for(tmp_path: Path) -> None:
    runs = [run_at(tmp_path / f"{rate}", rate, rate / 3) for rate in (16.0, 24.0, 20.0)]
    probes = tuple(judged(run, rate, LIMITS[0]) for run, rate in zip(runs, (16.0, 24.0, 20.0), strict=True))
    chart = Comparison("1k-256", {}, [Curve("one", 1, LIMITS[0], probes)]).charts()[0]
    line = re.search(r'class="line teal" d="M([^"]*)"', chart.render())
    assert line is not None
    across = [float(point.split(",")[0]) for point in line[1].split("L")]
    assert across == sorted(across)
    assert len(across) == 3


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int]]:
    """Arms of which `late` does not come up, and whose steps take as long as their rate per GPU says; the
    runs that were made: URL, rate, seed."""
    runs: list[tuple[str, float, int]] = []

    @contextlib.asynccontextmanager
    async def serve(arm: Arm, setup: Setup, gpus: Sequence[str]) -> AsyncIterator[Target]:
        if arm.name == "late":
            raise NotServedError("it was not ready in time")
        await asyncio.sleep(0)
        yield Target(f"{arm.gpus}")

    async def measure(load: Load, target: Target, folder: Path, vocab: int) -> Run:
        runs.append((target.url, load.rate, load.seed))
        return run_at(folder, load.rate, load.rate / int(target.url))

    monkeypatch.setattr(program, "serve", serve)
    monkeypatch.setattr(program, "measure", measure)
    return runs


@pytest.mark.parametrize("at_once", [False, True])
async def test_arms_beside_one_another(
    tmp_path: Path, fakes: list[tuple[str, float, int]], *, at_once: bool
) -> None:
    arms = [parse_arm(text) for text in ("both", "late=vllm", "1p1d", "2p1d")]
    costs = read_profile("8b-h200").costs
    plan = Plan(WORKLOADS["1k-256"], (4.0, 8.0), 10.0, 3, LIMITS, None, costs, tmp_path / "runs")
    comparison = Comparison("1k-256", {"hardware": "none"})
    setup = Setup("tiny", "fp32", "cpu", 64, "vllm", tmp_path)
    await compare(plan, arms, setup, comparison, ["0", "1"], at_once)
    assert sorted(fakes) == [("1", 4.0, 3), ("1", 8.0, 1003), ("2", 8.0, 3), ("2", 16.0, 1003)]
    head, _, six, twelve = comparison.table().splitlines()
    assert head == (
        "| TPOT limit | both (1 GPU) | both, ideal (1 GPU) | late (1 GPU) | 1p1d (2 GPUs) "
        "| 1p1d, ideal (2 GPUs) | 2p1d (3 GPUs) |"
    )
    cells = [cell.strip() for cell in six.split("|")[1:-1]]
    assert cells[0] == "6 ms"
    for cell in (cells[1], cells[4]):
        assert 4 < float(cell.split()[0]) < 8, "the crossing between the two rates, per GPU"
    assert cells[3] == "skipped: it was not ready in time"
    assert cells[6] == "skipped: needs 3 GPUs, 2 here"
    assert twelve.split("|")[2].strip() == "above 8"
    comparison.write(tmp_path, tmp_path / "images")
    image = (tmp_path / "images" / "goodput-1k-256-6ms.svg").read_text()
    assert xml.etree.ElementTree.fromstring(image).tag.endswith("svg")
    streams = json.loads((tmp_path / "runs" / "1p1d.json").read_text())["streams_ms"]
    assert streams["8"]["first_gap_p99"] == pytest.approx(8.0)
    written = json.loads((tmp_path / "goodput.json").read_text())
    assert len(written["curves"]) == 6 * len(LIMITS)
    assert "needs 3 GPUs" in (tmp_path / "goodput.md").read_text()
    page = (tmp_path / "goodput.html").read_text()
    assert page.count("<svg") == len(LIMITS)
    assert "1p1d, ideal" not in page, "it has the colour of 1p1d"
    assert page.count("dashed: ideal") == len(LIMITS)
    assert page.count('class="line teal dashed"') == page.count('class="line teal"') == len(LIMITS)


async def test_the_table_is_made_again_of_what_two_commands_left(
    tmp_path: Path, fakes: list[tuple[str, float, int]]
) -> None:
    """The second was interrupted in one run, which loadgen then wrote as far as it was, and cut off in its
    last."""
    costs = read_profile("8b-h200").costs
    setup = Setup("tiny", "fp32", "cpu", 64, "vllm", tmp_path)
    tables = []
    for number, text in enumerate(("both", "1p1d")):
        out, arms = tmp_path / str(number), [parse_arm(text)]
        plan = Plan(WORKLOADS["1k-256"], (4.0, 8.0), 10.0, 3, LIMITS, None, costs, out)
        comparison = Comparison("1k-256", {"hardware": "none", "command": text})
        out.mkdir()
        write_arms(out, comparison, arms)
        await compare(plan, arms, setup, comparison, ["0", "1"], at_once=False)
        tables.append(comparison)
    found = compared([tmp_path / "0", tmp_path / "1"], LIMITS, costs)
    assert found.curves == tables[0].curves + tables[1].curves
    assert found.about == {"hardware": "none", "command": "both; 1p1d"}
    about = tmp_path / "1" / "1p1d" / "4" / "about.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"stopped": True}))
    stopped = compared([tmp_path / "1"], LIMITS, None)
    assert [[probe.rate for probe in curve.probes] for curve in stopped.curves] == [[16.0], [16.0]]
    about.write_text(json.dumps(json.loads(about.read_text()) | {"stopped": False}))
    (tmp_path / "1" / "1p1d" / "8" / "settings.json").unlink()
    cut = compared([tmp_path / "1"], LIMITS, None)
    assert [len(curve.probes) for curve in cut.curves] == [1, 1]
    (tmp_path / "2").mkdir()
    write_arms(tmp_path / "2", Comparison("1k-256", {}), [parse_arm("1p1d")], LIMITS[1])
    shutil.copytree(tmp_path / "1" / "1p1d" / "4", tmp_path / "2" / "1p1d" / "4")
    one = compared([tmp_path / "0", tmp_path / "2"], LIMITS, None)
    curves = [(curve.arm, curve.limits.tpot_ms) for curve in one.curves]
    assert curves == [("both", 6), ("both", 12), ("1p1d", 12)]
    joined = compared([tmp_path / "2", tmp_path / "1"], LIMITS, None).curves
    assert [[probe.rate for probe in curve.probes] for curve in joined] == [[8.0], [8.0, 8.0]]
    assert one.table().splitlines()[2].endswith("|  |")
    write_arms(tmp_path / "1", Comparison("chat", {}), [])
    with pytest.raises(ValueError, match="different workloads: 1k-256, chat"):
        compared([tmp_path / "0", tmp_path / "1"], LIMITS, None)
