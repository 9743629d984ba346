"""A search or a sweep as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from loadgen.common.formatting import limits, number, percent
from loadgen.goodput.curve import Curve, Point
from loadgen.reports.console import goodput_line
from loadgen.reports.page import Tile, heading, page, reasons, section, table, tiles
from loadgen.reports.page import charts as side_by_side
from loadgen.reports.scales import Scale, around, around_log
from loadgen.reports.svg import Chart

_STYLES = {"pass": "teal", "fail": "orange", "unstable": "red"}


def curve_page(curve: Curve) -> str:
    """The page; every point links to the report of its run."""
    title = f"{curve.kind} of {curve.target}"
    lines = [goodput_line(curve)] if curve.kind == "search" else []
    if curve.limits_ms:
        lines.append(
            f"good: {limits(curve.limits_ms)}; goal {percent(curve.goal)}; {curve.seconds:.0f} s in all"
        )
    verdict, style = _verdict(curve)
    parts = [
        heading(title, verdict, style, lines),
        reasons(curve.invalid),
        tiles(_tiles(curve)) if curve.crossing is not None else "",
        section("Over the rate", side_by_side(curve_charts(curve))),
        section("Runs", _points(curve.points)),
        f'<p class="soft">goodput: {escape(curve.formula)}</p>' if curve.kind == "search" else "",
    ]
    return page(title, [part for part in parts if part])


def _verdict(curve: Curve) -> tuple[str, str]:
    if curve.kind != "search":
        return "", ""
    if curve.invalid:
        return "INVALID", "invalid"
    return ("found", "valid") if curve.crossing is not None else ("not found", "fail")


def _tiles(curve: Curve) -> list[Tile]:
    assert curve.crossing is not None
    found = curve.crossing
    some = [Tile("goodput a second", number(found.rate), f"{number(found.low)} to {number(found.high)}")]
    for point in curve.points:
        if point.folder == curve.confirmed:
            probe = point.probe
            ends = f"{percent(probe.low)} to {percent(probe.high)}"
            some.append(
                Tile(
                    f"attained in {probe.seconds:.0f} s at {number(probe.rate)}/s",
                    percent(probe.attainment),
                    ends,
                )
            )
            some.append(Tile("TTFT p99 there", f"{number(point.figures['ttft_p99'])} ms"))
            some.append(Tile("TPOT p99 there", f"{number(point.figures['tpot_p99'])} ms"))
    return some


def curve_charts(curve: Curve) -> list[Chart | None]:
    """Attainment, goodput and latencies over the rate."""
    points = curve.points
    if not points:
        return []
    return [
        _attainment(curve),
        _good_rate(curve),
        *(_latency(curve, name) for name in ("ttft", "tpot", "e2el")),
    ]


def _rates(points: Sequence[Point]) -> Scale:
    rates = [point.probe.rate for point in points]
    spread = max(rates) - min(rates) or max(rates)
    return Scale(max(0.0, min(rates) - spread / 10), max(rates) + spread / 10)


def _attainment(curve: Curve) -> Chart:
    chart = Chart("Attainment", _rates(curve.points), Scale(0.0, 1.0), "requests a second", "share")
    if curve.crossing is not None:
        chart.shade(curve.crossing.low, curve.crossing.high, "goodput, 95 %")
        chart.upright(curve.crossing.rate, "blue", f"{number(curve.crossing.rate)}/s")
    chart.level(curve.goal, "grey", f"goal {percent(curve.goal)}")
    for verdict, style in _STYLES.items():
        some = [point.probe for point in curve.points if point.probe.verdict == verdict]
        chart.whiskers([(one.rate, one.low, one.high) for one in some], style)
        titles = [f"{number(one.rate)}/s: {percent(one.attainment)} of {one.requests}" for one in some]
        chart.dots([(one.rate, one.attainment) for one in some], style, verdict, radius=4, titles=titles)
    return chart


def _good_rate(curve: Curve) -> Chart:
    points = curve.points
    values = [(point.probe.rate, point.good_rate) for point in points]
    chart = Chart(
        "Good requests a second",
        _rates(points),
        around([y for _, y in values]),
        "requests a second",
        "good/s",
    )
    top = min(chart.x.high, chart.y.high)
    chart.line([(chart.x.low, chart.x.low), (top, top)], "grey", "if all were good")
    chart.dots(values, "blue", radius=4)
    return chart


def _latency(curve: Curve, name: str) -> Chart | None:
    points = curve.points
    names = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}
    lines = {
        percentile: [
            (point.probe.rate, value)
            for point in points
            if (value := point.figures.get(f"{name}_p{percentile}")) is not None
        ]
        for percentile in ("50", "90", "99")
    }
    values = [value for line in lines.values() for _, value in line]
    if not values:
        return None
    chart = Chart(names[name], _rates(points), around_log(values), "requests a second", "ms")
    for (percentile, line), style in zip(lines.items(), ("teal", "orange", "purple"), strict=True):
        # No line for a search: its probes are close together and the line would show their noise.
        if curve.kind == "sweep":
            chart.line(line, style)
        chart.dots(line, style, f"p{percentile}", radius=3.5)
    return chart


def _points(points: Sequence[Point]) -> str:
    head = [
        "rate/s",
        "verdict",
        "attainment",
        "95 %",
        "requests",
        "good/s",
        "TTFT p99",
        "TPOT p99",
        "ITL p99",
        "remarks",
    ]
    rows = [
        [
            f'<a href="{escape(point.folder)}/report.html">{number(point.probe.rate)}</a>',
            f'<span class="verdict {point.probe.verdict}">{point.probe.verdict}</span>',
            percent(point.probe.attainment),
            f"{percent(point.probe.low)} to {percent(point.probe.high)}",
            str(point.probe.requests),
            number(point.good_rate),
            number(point.figures["ttft_p99"]),
            number(point.figures["tpot_p99"]),
            number(point.figures["itl_p99"]),
            escape("; ".join(point.invalid)),
        ]
        for point in points
    ]
    return table(head, rows, words=len(head) - 1)
