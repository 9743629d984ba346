"""Prints a run, a search or a sweep on a terminal."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.analysis.quantities import Quantity
from loadgen.analysis.run_folder import Run
from loadgen.analysis.summary import Attainment, Summary
from loadgen.common.formatting import counts, interval, limits, number, percent
from loadgen.goodput.curve import Curve, Point
from loadgen.goodput.probe import Verdict
from loadgen.reports.descriptions import cache_words, leak_words

# Style of a passed leak check, and of any other.
_LEAK_STYLES = {True: "dim", False: "yellow"}
_VERDICT_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "yellow", Verdict.UNSTABLE: "red"}
_BAR = 20
SHOWN = ("50", "90", "95", "99", "99.9")


def plain_table() -> Table:
    """An empty table with a rule below its headings."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


def show_run(run: Run, console: Console) -> None:
    """Prints verdict, counts, percentiles with their formulas, and the folder."""
    console.print(Group(*_parts(run.summary, console.width)))
    console.print(Text(leak_words(run.about), style=_LEAK_STYLES[run.about.get("leaks") == []]))
    console.print(Text(f"raw record and report: {run.path}", style="dim"))


def _parts(summary: Summary, width: int) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for reason in summary.invalid:
        parts.append(Text(f"INVALID  {reason.text}", style="bold red"))
    for caution in summary.cautions:
        parts.append(Text(f"caution  {caution}", style="yellow"))
    parts.append(Text(_counts_line(summary)))
    parts.append(Text(_throughput_line(summary)))
    parts.append(Text(cache_words(summary)))
    parts.append(Text(_window_line(summary), style="dim"))
    parts += [Text(line) for line in attainment_lines(summary)]
    parts.append(_percentiles(summary, wide=width >= 110))
    return parts


def _counts_line(summary: Summary) -> str:
    line = f"{summary.due} requests, failed: {counts(summary.failed)}"
    if summary.cancelled:
        line += f"; cancelled by their client: {summary.cancelled}"
    if summary.mismatches:
        line += f"; wrong token counts: {sum(summary.mismatches.values())}"
    return line


def _throughput_line(summary: Summary) -> str:
    throughput = summary.throughput
    return (
        f"per second: {number(throughput.offered)} due, {number(throughput.sent)} sent, "
        f"{number(throughput.ended_well)} succeeded; "
        f"tokens {number(throughput.input_tokens)} in, {number(throughput.output_tokens)} out"
    )


def _window_line(summary: Summary) -> str:
    window = summary.window
    return (
        f"window {number(window.since)} to {number(window.until)} s ({summary.planned - summary.due} requests"
        f" outside): {window.steadiness}, {number(window.backlog)} requests in the server on average"
    )


def attainment_lines(summary: Summary) -> list[str]:
    """Attainment of all requests and of every class; empty without limits."""
    if summary.attainment is None:
        return []
    lines = [_attainment(summary.attainment, "attainment", summary.throughput.good)]
    lines += [_attainment(one, f"  {name}", None) for name, one in summary.classes.items()]
    return lines


def _attainment(one: Attainment, name: str, good_rate: float | None) -> str:
    ends = f"[{percent(one.share.low)}, {percent(one.share.high)}]"
    line = f"{name} {percent(one.share.value)} {ends} of {one.judged} within {limits(one.limits_ms)}"
    if good_rate is not None:
        verdict = "met" if one.share.value >= one.goal else "missed"
        line += f"; goal {percent(one.goal)}: {verdict}; {number(good_rate)} good per second"
    return line


def _percentiles(summary: Summary, *, wide: bool) -> Table:
    table = plain_table()
    table.add_column("ms")
    for percentile in SHOWN:
        table.add_column(f"p{percentile}", justify="right", no_wrap=True)
    table.add_column("max", justify="right", no_wrap=True)
    table.add_column("p99 is within", no_wrap=True)
    if wide:
        table.add_column("formula", style="dim")
    for quantity in summary.quantities.values():
        if quantity.count:
            table.add_row(*_row(quantity, wide=wide))
    for quantity in summary.stages.values():
        table.add_row(*_row(quantity, wide=wide), style="cyan")
    return table


def _row(quantity: Quantity, *, wide: bool) -> list[str]:
    cells = [quantity.title, *(number(quantity.at(one)) for one in SHOWN), number(quantity.max)]
    p99 = quantity.percentiles["99"]
    cells.append(interval(p99.low, p99.high))
    return [*cells, quantity.formula] if wide else cells


def show_curve(curve: Curve, path: Path, console: Console) -> None:
    """Prints the finding and every point, by rate."""
    for reason in curve.invalid:
        console.print(Text(f"INVALID  {reason}", style="bold red"))
    if curve.kind == "search":
        console.print(Text(goodput_line(curve), style="bold"))
        console.print(Text(curve.formula, style="dim"))
    console.print(_points(curve.points, wide=console.width >= 110))
    console.print(Text(f"{number(curve.seconds)} s; runs and report: {path}", style="dim"))


def goodput_line(curve: Curve) -> str:
    """The finding in one line."""
    wanted = f"{percent(curve.goal)} within {limits(curve.limits_ms)}"
    if curve.crossing is None:
        return f"no goodput for {wanted}: {curve.finding}"
    found = curve.crossing
    line = f"goodput {number(found.rate)}/s {interval(found.low, found.high)} for {wanted}"
    confirmed = next((one.probe for one in curve.points if one.folder == curve.confirmed), None)
    if confirmed is not None:
        line += (
            f"; held over {confirmed.seconds:.0f} s at {number(confirmed.rate)}/s: "
            f"{percent(confirmed.attainment)} [{percent(confirmed.low)}, {percent(confirmed.high)}]"
        )
    else:
        line += "; not confirmed: the last run at that rate did not hold"
    return line


def _points(points: tuple[Point, ...], *, wide: bool) -> Table:
    table = plain_table()
    for name in ("rate/s", "verdict", "attained", "within", "good/s", "TTFT p99", "TPOT p99"):
        table.add_column(name, justify="left" if name in ("verdict", "within") else "right", no_wrap=True)
    if wide:
        table.add_column("", no_wrap=True)
    for point in points:
        probe = point.probe
        bar = "█" * round(probe.attainment * _BAR)
        cells: list[str | Text] = [
            number(probe.rate),
            Text(probe.verdict.value, style=_VERDICT_STYLES[probe.verdict]),
            percent(probe.attainment),
            f"[{percent(probe.low)}, {percent(probe.high)}]",
            number(point.good_rate),
            number(point.figures["ttft_p99"]),
            number(point.figures["tpot_p99"]),
        ]
        table.add_row(*cells, *([bar] if wide else []))
    return table
