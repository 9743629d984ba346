"""The charts of one run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.analysis.columns import Columns
from loadgen.analysis.metrics import tpot, ttft
from loadgen.analysis.steady import MeasuredWindow, backlog_at
from loadgen.analysis.summary import STAGES
from loadgen.common.arrays import Floats, Integers
from loadgen.common.record import NO_FAILURE, Outcome
from loadgen.reports.scales import Scale, around, around_log
from loadgen.reports.svg import Chart

_PARTS = 120
_MOST_DOTS = 2500
_STAGE_STYLES = dict(zip(STAGES, ("grey", "purple", "blue", "orange", "teal"), strict=True))


def distribution(name: str, milliseconds: Floats, limit: float | None, style: str) -> Chart | None:
    """The distribution of latencies; None without data."""
    if not len(milliseconds):
        return None
    ordered = np.sort(milliseconds)
    places = np.unique(np.linspace(0, len(ordered) - 1, 300).astype(int))
    values = np.maximum(ordered[places], 1e-3)
    shares = (places + 1) / len(ordered)
    chart = Chart(name, around_log([*values, limit or values[0]]), Scale(0.0, 1.0), "ms", "share")
    chart.line(list(zip(values, shares, strict=True)), style, steps=True)
    if limit is not None:
        chart.upright(limit, "red", f"limit {limit:g} ms", at_bottom=True)
    for share in (0.5, 0.99):
        chart.dots(
            [(float(np.quantile(ordered, share)), share)], style, radius=4, titles=[f"p{share * 100:g}"]
        )
    return chart


def over_time(columns: Columns, window: MeasuredWindow, metric: str, limit: float | None) -> Chart | None:
    """Every request's TTFT or TPOT over its due time; misses are highlighted."""
    of, title = (ttft, "TTFT over time") if metric == "ttft" else (tpot, "TPOT over time")
    rows = [
        (record.scheduled, value * 1e3, good, record)
        for record, good in zip(columns.records, columns.good.tolist(), strict=True)
        if record.outcome == Outcome.OK and (value := of(record)) is not None
    ]
    if not rows:
        return None
    shown = rows[:: -(-len(rows) // _MOST_DOTS)]
    chart = Chart(title, _seconds(columns), around_log([row[1] for row in rows]), "s since the start", "ms")
    chart.shade(window.since, window.until, "window")
    for wanted, style, label in ((True, "blue", "good"), (False, "red", "missed a limit")):
        some = [row for row in shown if row[2] is wanted]
        titles = [f"{row[3].request_id}: {row[1]:.1f} ms" for row in some]
        chart.dots([(row[0], row[1]) for row in some], style, label, radius=1.6, titles=titles)
    if limit is not None and chart.y.low < limit < chart.y.high:
        chart.level(limit, "red", f"limit {limit:g} ms")
    return chart


def backlog(columns: Columns, window: MeasuredWindow) -> Chart:
    """The backlog, and failed requests."""
    scale = _seconds(columns)
    times = np.linspace(scale.low, scale.high, 400)
    counts = backlog_at(times, columns.scheduled, columns.ended)
    chart = Chart("Requests in the server", scale, around(counts.tolist()), "s since the start", "requests")
    chart.shade(window.since, window.until, "window")
    chart.line(list(zip(times, counts, strict=True)), "blue", steps=True)
    failed = [record for record in columns.records if record.outcome not in NO_FAILURE]
    points = [(record.scheduled, chart.y.low) for record in failed]
    chart.dots(points, "red", "failed", radius=3, titles=[record.outcome for record in failed])
    return chart


def throughput(columns: Columns, window: MeasuredWindow) -> Chart | None:
    """Chart of output tokens received per second; None without tokens."""
    times = np.array([time for record in columns.records for time in record.token_times])
    if not len(times):
        return None
    scale = _seconds(columns)
    counts, edges = np.histogram(times, bins=_PARTS, range=(scale.low, scale.high))
    rates = counts / (edges[1] - edges[0])
    chart = Chart("Output tokens a second", scale, around(rates.tolist()), "s since the start", "tokens/s")
    chart.shade(window.since, window.until, "window")
    chart.line(list(zip(edges[:-1], rates, strict=True)), "teal", steps=True)
    return chart


def lag(columns: Columns) -> Chart | None:
    """Chart of the generator's own lag; None if nothing was sent."""
    rows = [(r.scheduled, (r.sent - r.scheduled) * 1e3) for r in columns.records if r.sent is not None]
    if not rows:
        return None
    shown = rows[:: -(-len(rows) // _MOST_DOTS)]
    values = [max(1e-2, row[1]) for row in shown]
    chart = Chart("The generator's lag", _seconds(columns), around_log(values), "s since the start", "ms")
    chart.dots([(row[0], value) for row, value in zip(shown, values, strict=True)], "grey", radius=1.4)
    return chart


def stages_over_time(columns: Columns) -> Chart | None:
    """Mean time of requests in each stage at the server, over their due time."""
    rows = [record for record in columns.records if record.stages]
    if not rows:
        return None
    scale = _seconds(columns)
    edges = np.linspace(scale.low, scale.high, 41)
    parts = np.clip(np.digitize([row.scheduled for row in rows], edges) - 1, 0, 39)
    means = {
        stage: _mean_by(parts, np.array([(row.stages or {}).get(stage, 0.0) * 1e3 for row in rows]), 40)
        for stage in STAGES
    }
    top = float(np.nanmax(sum(means.values())))
    chart = Chart("Time at the server, by stage", scale, around([top]), "s since the start", "ms, mean")
    for part in range(40):
        low = 0.0
        for stage, values in means.items():
            if not np.isnan(values[part]) and values[part] > 0:
                title = f"{stage}: {values[part]:.2f} ms"
                chart.bar(edges[part], edges[part + 1], low, low + values[part], _STAGE_STYLES[stage], title)
                low += float(values[part])
    for stage in STAGES:
        if np.nansum(means[stage]) > 0:
            chart.name(_STAGE_STYLES[stage], stage)
    return chart


def _mean_by(parts: Integers, values: Floats, count: int) -> Floats:
    sums = np.bincount(parts, weights=values, minlength=count)
    counts = np.bincount(parts, minlength=count)
    return np.where(counts > 0, sums / np.maximum(1, counts), np.nan)


def _seconds(columns: Columns) -> Scale:
    """The time axis, the same in every chart."""
    ends: Sequence[float] = columns.ended[np.isfinite(columns.ended)].tolist()
    return Scale(0.0, max([1e-3, *ends, *columns.scheduled.tolist()]))
