"""Reports of runs, curves and comparisons: whole, self-contained, and made from the raw record alone."""

from __future__ import annotations

import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from rich.console import Console

from loadgen.analysis import run_folder
from loadgen.analysis.comparison import Difference, compare
from loadgen.analysis.run_folder import SETTINGS, Run
from loadgen.analysis.steady import Steadiness
from loadgen.cli import main
from loadgen.common.formatting import number
from loadgen.common.record import Measured, Record
from loadgen.common.server_samples import Sample, read_samples, write_samples
from loadgen.generator.processes import Progress
from loadgen.generator.progress import ProgressView
from loadgen.generator.scrape import read_metrics
from loadgen.goodput.crossing import Crossing
from loadgen.goodput.curve import Curve, Point, read_curve, write_curve
from loadgen.goodput.probe import Probe, Verdict
from loadgen.reports.html_curve import curve_page
from loadgen.reports.html_run import run_page
from loadgen.reports.markdown import run_markdown
from loadgen.reports.scales import Scale, around, around_log
from loadgen.reports.server_charts import all_series, server_charts
from loadgen.reports.svg import Chart
from loadgen.reports.write import write_reports
from tests.loadgen.builders import record, settings


def make_run(
    path: Path, *, wait_s: float = 0.1, seed: int = 1, failed: int = 0, requests: int = 600, **wanted: Any
) -> Run:
    """A run whose requests' first tokens take about `wait_s`."""
    path.mkdir(parents=True)
    random = np.random.default_rng(seed)
    stages = {"queue": 0.01, "prefill": 0.05, "transfer": 0.01, "decode": 0.03}
    records: list[Record] = []
    for n in range(requests):
        wait = wait_s * random.lognormal(0, 0.2)
        times = [wait, wait + 0.012, wait + 0.02]
        outcome = "HTTP_503" if n < failed else "OK"
        records.append(
            record(n / 20, times, conversation=n, outcome=outcome, stages=stages, request_id=f"0-{n}-0")
        )
    records = [Record.from_line(one.to_line()) for one in records]
    wanted.setdefault("judge", {"goodput": {"ttft": 130.0}})
    measured = Measured(
        records, 1.8e9, 100.0, [{"loop_lag_ms": {"p99": 0.2}, "cpu_share": 0.1}], stopped=False
    )
    return run_folder.keep(path, settings(**wanted), measured, {"lone_s": 0.1, "warmups": 4, "leaks": []})


class _Check(HTMLParser):
    """Every element is closed, and nothing is fetched."""

    void = frozenset({"meta", "br", "hr", "img", "link", "path", "circle", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe", "img")
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.void

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(html: str) -> list[str]:
    """The links of a page that is whole."""
    parser = _Check()
    parser.feed(html)
    assert parser.open == []
    assert not re.search(r"url\(|@import|https?://(?!127)", html)
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(svg)
        assert "nan" not in svg.lower()
    return parser.links


def test_a_runs_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", failed=5)
    html = run_page(run)
    assert check(html) == []
    for words in (
        "VALID",
        "TTFT over time",
        "Time at the server, by stage",
        "limit 130 ms",
        "attainment",
        "HTTP_503",
    ):
        assert words in html
    assert html.count("<svg") == 9
    for formula in run.summary.formulas.values():
        assert escape(formula) in html


def test_an_invalid_runs_page_has_the_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", failed=300)
    html = run_page(run)
    assert '<span class="verdict invalid">INVALID</span>' in html
    assert run.summary.invalid[0].text in html


def test_a_run_without_anything_has_a_page(tmp_path: Path) -> None:
    measured = Measured([record(0.0, [], outcome="CONNECT")], 0.0, 0.0, [], stopped=True)
    run = run_folder.keep(tmp_path, settings(), measured, {})
    check(run_page(run))
    assert "INVALID" in run_markdown(run)
    (tmp_path / "none").mkdir()
    check(
        run_page(run_folder.keep(tmp_path / "none", settings(), Measured([], 0.0, 0.0, [], stopped=True), {}))
    )


def test_what_comes_from_outside_is_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", target={"timeout_s": 1.0}, url="grpc://<script>alert(1)</script>:1")
    check(run_page(run))


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    again = run_folder.load(tmp_path / "a")
    assert again.summary.as_dict() == run.summary.as_dict()
    assert list(again.records) == list(run.records)


def test_parquet_has_the_same_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    write_reports(run, parquet=True)
    rows = parquet.read_table(tmp_path / "a" / "requests.parquet").to_pylist()
    assert len(rows) == 600
    assert rows[7]["token_times"] == run.records[7].token_times
    assert rows[7]["outcome"] == "OK"


def test_report_makes_it_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a")
    assert main(["report", str(tmp_path / "a")]) == 0
    assert "TTFT" in capsys.readouterr().out
    check((tmp_path / "a" / "report.html").read_text())
    table = (tmp_path / "a" / "report.md").read_text()
    assert "| TTFT |" in table
    assert "first token - scheduled send" in table
    assert main(["report", str(tmp_path / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["valid"] is True
    assert main(["report", str(tmp_path)]) == 2


def by_name(differences: list[Difference]) -> dict[str, Difference]:
    return {one.name: one for one in differences}


def test_a_difference_that_is_there_is_certain(tmp_path: Path) -> None:
    slow = make_run(tmp_path / "slow", wait_s=0.115, seed=2)
    fast = make_run(tmp_path / "fast", wait_s=0.1, seed=1)
    found = by_name(compare(slow, fast))
    one = found["TTFT p50"]
    assert one.certain
    assert one.low is not None
    assert one.high is not None
    assert one.low <= -15.0 + 2 <= one.high + 4
    assert found["attainment"].second > found["attainment"].first
    assert found["attainment"].certain
    assert not found["TPOT p50"].certain


def test_a_difference_that_is_not_there_is_hardly_ever_certain(tmp_path: Path) -> None:
    base = make_run(tmp_path / "base", seed=100)
    certain = 0
    for seed in range(4):
        other = make_run(tmp_path / str(seed), seed=seed)
        certain += by_name(compare(base, other))["TTFT p50"].certain
    assert certain <= 1


def test_runs_with_different_prompts_are_compared_with_a_word_of_caution(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for folder, seed in zip(folders, (3, 4, 3), strict=True):
        make_run(folder, requests=60)
        document = json.loads((folder / SETTINGS).read_text())
        document["load"]["seed"] = seed
        (folder / SETTINGS).write_text(json.dumps(document))
    for other, cautioned in ((folders[1], True), (folders[2], False)):
        assert main(["compare", str(folders[0]), str(other)]) == 0
        assert ("--seed 3" in capsys.readouterr().out) == cautioned
        assert main(["compare", str(folders[0]), str(other), "--json"]) == 0
        assert ("--seed 3" in json.loads(capsys.readouterr().out)["caution"]) == cautioned


def test_compare_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [
        str(make_run(tmp_path / name, wait_s=wait, seed=3, requests=100).path)
        for name, wait in (("a", 0.1), ("b", 0.2))
    ]
    page = tmp_path / "page.html"
    assert main(["compare", *folders, "--html", str(page)]) == 0
    assert "* TTFT p50 ms" in capsys.readouterr().out
    check(page.read_text())
    assert main(["compare", *folders, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["valid"] == dict.fromkeys(folders, True)
    assert len(reported["differences"][folders[1]]) > 10
    assert main(["compare", folders[0]]) == 2


def make_curve(kind: str = "search") -> Curve:
    verdicts = [
        (10.0, 0.99, Verdict.PASS),
        (12.0, 0.91, Verdict.PASS),
        (13.0, 0.7, Verdict.FAIL),
        (20.0, 0.1, Verdict.UNSTABLE),
    ]
    figures: dict[str, float | None] = {
        f"{name}_p{q}": None if name == "tpot" else 10.0 * q
        for name in ("ttft", "tpot", "itl", "e2el")
        for q in (50, 90, 99)
    }
    points = tuple(
        Point(
            Probe(
                rate,
                rate,
                60.0,
                500,
                share,
                80.0,
                share - 0.05,
                min(1.0, share + 0.05),
                Steadiness.STEADY,
                verdict,
            ),
            f"{n:03d}-{rate:g}",
            (),
            rate * share,
            figures,
        )
        for n, (rate, share, verdict) in enumerate(verdicts, 1)
    )
    crossing = Crossing(12.1, 11.8, 12.6) if kind == "search" else None
    return Curve(kind, "grpc://x:1", 0.9, {"ttft": 300.0}, points, "found", crossing, "002-12", 123.0)


@pytest.mark.parametrize("kind", ["search", "sweep"])
def test_a_curves_page(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    curve = make_curve(kind)
    links = check(curve_page(curve))
    assert links == [f"{point.folder}/report.html" for point in curve.points]
    write_curve(tmp_path, curve)
    assert read_curve(tmp_path) == curve
    assert main(["report", str(tmp_path)]) == 0
    reported = capsys.readouterr().out
    assert ("goodput 12.1/s [11.8, 12.6]" in reported) is (kind == "search")
    assert (tmp_path / "report.md").read_text().count("| pass |") == 2


def test_searches_are_compared_by_their_goodput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_curve(tmp_path / name, make_curve())
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "1.00 [0.94, 1.07]" in capsys.readouterr().out


METRICS = """# TYPE requests counter
requests_total{model="m",outcome="ok"} 5
# TYPE waiting gauge
waiting{worker="d0"} 2
# TYPE seconds histogram
seconds_bucket{le="1"} 3
seconds_bucket{le="+Inf"} 4
seconds_sum 7.5
seconds_count 4
# TYPE process_cpu_seconds counter
process_cpu_seconds_total 9
"""


def test_metrics_are_read() -> None:
    assert read_metrics(METRICS) == {
        "requests_total{model=m,outcome=ok}": 5.0,
        "waiting{worker=d0}": 2.0,
        "seconds_sum": 7.5,
        "seconds_count": 4.0,
    }
    with pytest.raises(ValueError):
        read_metrics("{ no metrics")


def test_server_metrics_on_the_runs_axis(tmp_path: Path) -> None:
    samples = [
        Sample(
            float(at),
            source,
            {"waiting{worker=d0}": at % 4 * factor, "done_total": at * 3.0 * factor, "still": 1.0},
        )
        for at in range(20)
        for source, factor in (("d0", 1.0), ("d1", 2.0))
    ]
    write_samples(tmp_path / "metrics.jsonl", samples)
    assert read_samples(tmp_path / "metrics.jsonl") == samples
    growth = {one.source: one.points for one in all_series(samples) if one.name == "done_total a second"}
    assert {value for _, value in growth["d1"]} == {6.0}
    charts = server_charts(samples, 20.0)
    assert [chart.title for chart in charts] == ["waiting"]
    assert charts[0].render().count('class="line') == 2
    assert read_samples(tmp_path / "none") == []


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_lie_on_their_axis(low: float, width: float) -> None:
    scale = Scale(low, low + width)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(low - 1e-6 * width <= tick <= low + width * (1 + 1e-6) for tick in ticks)
    assert scale.place(low) == 0.0
    assert scale.place(low + width) == 1.0


@given(st.lists(st.floats(1e-4, 1e6), min_size=1, max_size=20))
def test_scales_hold_their_values(values: list[float]) -> None:
    for scale in (around(values), around_log(values)):
        assert all(scale.low <= value <= scale.high for value in values)
        assert scale.ticks()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (1234567.0, "1,234,567"),
        (12.345, "12.3"),
        (0.01234, "0.0123"),
        (-3.0, "-3.00"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def shown(view: ProgressView) -> str:
    with Path("/dev/null").open("w") as nowhere:
        console = Console(width=120, record=True, file=nowhere)
        console.print(view.render())
        return console.export_text()


def test_progress_shows_rates_and_attainment() -> None:
    view = ProgressView(settings(rate=50.0, num_requests=1000), "run", lambda progress: progress.sent < 300)
    for n in range(1, 9):
        goes_on = view.watch(Progress(n * 0.25, n * 12, n * 10, 1, n * 9, 0, n * 100, 1.5))
    assert goes_on
    text = shown(view)
    for words in ("offered/s", "50.0", "48.0", "40.0", "90.0 %", "16"):
        assert words in text
    assert not view.watch(Progress(3.0, 300, 10, 0, 0, 0, 0, 0.0))


def test_progress_shows_what_a_ramp_offers_now() -> None:
    """More than is sent, where the generator cannot keep up."""
    view = ProgressView(settings(stages=("60:10-100",)), "run")
    for n in range(1, 9):
        view.watch(Progress(n * 0.25, n * 12, n * 10, 1, n * 9, 0, n * 100, 1.5, due=n * 19))
    assert "76.0" in shown(view)


def test_a_legend_that_does_not_fit_has_further_lines() -> None:
    few, many = (Chart("Attainment", Scale(0.0, 1.0), Scale(0.0, 1.0), "rate", "share") for _ in range(2))
    few.name("blue", "one")
    for arm in range(9):
        many.name("blue", f"arm number {arm}")
    assert 'viewBox="0 0 560 290"' in few.render()
    drawn = many.render()
    assert 'viewBox="0 -16 560 306"' in drawn
    places = [float(x) for x in re.findall(r'class="note" x="([-0-9.]+)"', drawn)]
    assert len(places) == 9
    assert min(places) > 0
