"""One run as an HTML page."""

from __future__ import annotations

from html import escape

import numpy as np

from loadgen.analysis.columns import Columns
from loadgen.analysis.metrics import tpot, ttft
from loadgen.analysis.quantities import PERCENTILES, Quantity, defined, gaps_of
from loadgen.analysis.run_folder import METRICS, Run
from loadgen.analysis.slo import Judge
from loadgen.analysis.summary import Attainment, Summary
from loadgen.common.formatting import counts, interval, limits, number, percent
from loadgen.common.record import Outcome
from loadgen.common.server_samples import read_samples
from loadgen.reports import charts
from loadgen.reports.descriptions import leak_words, limit_words, load_words, prompt_words
from loadgen.reports.page import Tile, folded, heading, page, reasons, section, table, tiles
from loadgen.reports.page import charts as side_by_side
from loadgen.reports.server_charts import server_charts
from loadgen.reports.svg import Chart


def run_page(run: Run) -> str:
    """Returns the HTML page of a run."""
    summary, settings = run.summary, run.settings
    columns = Columns.of(run.records, Judge.of(settings))
    title = f"{settings.target.model} at {settings.target.url}"
    lines = [
        load_words(settings.load),
        prompt_words(settings),
        limit_words(settings),
        _when(run),
        leak_words(run.about),
    ]
    seconds = float(columns.ended[np.isfinite(columns.ended)].max(initial=1e-3))
    samples = read_samples(run.path / METRICS)
    verdict = "VALID" if summary.valid else "INVALID"
    parts = [
        heading(title, verdict, verdict.lower(), [one for one in lines if one]),
        reasons([reason.text for reason in summary.invalid]),
        reasons([*summary.cautions, *_leaks(run)], caution=True),
        tiles(_tiles(summary)),
        section("Over time", side_by_side(_time_charts(run, columns))),
        section("Distributions, of the window", side_by_side(_distributions(run, columns))),
        section("Figures", _figures(summary) + _formulas(summary)),
        section("Attainment by class", _classes(summary.classes)),
        section("The server's own metrics", side_by_side(server_charts(samples, seconds))),
        section("Settings and versions", _settings(run)),
    ]
    return page(title, [part for part in parts if part])


def _leaks(run: Run) -> list[str]:
    """The result of the leak check."""
    return [f"still held after the run: {one}" for one in run.about.get("leaks") or []]


def _when(run: Run) -> str:
    window = run.summary.window
    began = run.about.get("started_at", "")[:19].replace("T", " ")
    return f"{began} UTC; window {number(window.since)} to {number(window.until)} s: {window.steadiness}"


def _tiles(summary: Summary) -> list[Tile]:
    some: list[Tile] = []
    if (attainment := summary.attainment) is not None:
        share = attainment.share
        some.append(
            Tile("attainment", percent(share.value), f"{percent(share.low)} to {percent(share.high)}")
        )
        good = number(summary.throughput.good)
        some.append(Tile("good requests a second", good, f"of {number(summary.throughput.offered)} due"))
    for name in ("ttft", "tpot", "itl"):
        quantity = summary.quantities[name]
        value = f"{number(quantity.at('50'))} / {number(quantity.at('99'))}"
        some.append(Tile(f"{quantity.title} p50 / p99", value, "ms"))
    some.append(Tile("output tokens a second", number(summary.throughput.output_tokens)))
    some.append(Tile("failed", str(sum(summary.failed.values())), counts(summary.failed)))
    if summary.cached_share is not None:
        some.append(Tile("prompt tokens cached", percent(summary.cached_share)))
    own = summary.generator
    sent, read = (summary.quantities[name].at("99") for name in ("lag", "read_lag"))
    # Without read lag, the lag of the event loop is the best estimate.
    lags = (
        sent,
        own["loop_lag_p99_ms"] if read is None else read,
        own["cpu_wait_p99_ms"],
        own["throttled_p99_ms"],
    )
    shown = " / ".join(number(one, 2) for one in lags)
    some.append(Tile("generator's lag p99, ms", shown, "send / read / CPU wait / CPU limit"))
    return some


def _time_charts(run: Run, columns: Columns) -> list[Chart | None]:
    window, goodput = run.summary.window, run.settings.judge.goodput
    return [
        charts.over_time(columns, window, "ttft", goodput.get("ttft")),
        charts.over_time(columns, window, "tpot", goodput.get("tpot")),
        charts.backlog(columns, window),
        charts.throughput(columns, window),
        charts.stages_over_time(columns),
        charts.lag(columns),
    ]


def _distributions(run: Run, columns: Columns) -> list[Chart | None]:
    window, goodput = run.summary.window, run.settings.judge.goodput
    inside = columns.within(window.since, np.nextafter(window.until, np.inf))
    good = [record for record in inside.records if record.outcome == Outcome.OK]
    first, _ = defined([ttft(record) for record in good])
    each, _ = defined([tpot(record) for record in good])
    gaps, _ = gaps_of(good)
    return [
        charts.distribution("TTFT", first * 1e3, goodput.get("ttft"), "blue"),
        charts.distribution("TPOT", each * 1e3, goodput.get("tpot"), "teal"),
        charts.distribution("ITL", gaps[gaps > 0] * 1e3, goodput.get("itl_p99"), "purple"),
    ]


def _figures(summary: Summary) -> str:
    head = ["ms", *(f"p{q:g}" for q in PERCENTILES), "max", "mean", "requests", "formula"]
    quantities = [one for one in (*summary.quantities.values(), *summary.stages.values()) if one.count]
    return table(head, [_row(one) for one in quantities], words=len(head) - 1)


def _row(quantity: Quantity) -> list[str]:
    cells = [escape(quantity.title)]
    for estimate in quantity.percentiles.values():
        ends = interval(estimate.low, estimate.high)
        cells.append(number(estimate.value) + (f"<small>{ends}</small>" if ends else ""))
    more = [number(quantity.max), number(quantity.mean), f"{quantity.count:,}", escape(quantity.formula)]
    return [*cells, *more]


def _formulas(summary: Summary) -> str:
    return "".join(
        f'<p class="soft">{escape(name)}: {escape(text)}</p>' for name, text in summary.formulas.items()
    )


def _classes(classes: dict[str, Attainment]) -> str:
    if not classes:
        return ""
    rows = [
        [
            escape(name),
            percent(one.share.value),
            f"{percent(one.share.low)} to {percent(one.share.high)}",
            str(one.judged),
            limits(one.limits_ms),
        ]
        for name, one in classes.items()
    ]
    return table(["class", "attainment", "95 %", "requests", "limits"], rows)


def _settings(run: Run) -> str:
    about = {name: value for name, value in run.about.items() if name != "processes"}
    return folded("settings", run.settings.model_dump(mode="json")) + folded("about", about)
