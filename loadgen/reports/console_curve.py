"""Prints a search or a sweep on a terminal."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadgen.common.formatting import interval, limits, number, percent
from loadgen.goodput.curve import Curve, Point
from loadgen.goodput.probe import Verdict

_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "yellow", Verdict.UNSTABLE: "red"}
_BAR = 20


def show_curve(curve: Curve, path: Path, console: Console) -> None:
    """Prints the finding and every point, by rate."""
    for reason in curve.invalid:
        console.print(Text(f"INVALID  {reason}", style="bold red"))
    if curve.kind == "search":
        console.print(Text(goodput_line(curve), style="bold"))
        console.print(Text(curve.formula, style="dim"))
    console.print(_table(curve.points, wide=console.width >= 110))
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


def _table(points: tuple[Point, ...], *, wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("rate/s", "verdict", "attained", "within", "good/s", "TTFT p99", "TPOT p99"):
        table.add_column(name, justify="left" if name in ("verdict", "within") else "right", no_wrap=True)
    if wide:
        table.add_column("", no_wrap=True)
    for point in points:
        probe = point.probe
        bar = "█" * round(probe.attainment * _BAR)
        cells: list[str | Text] = [
            number(probe.rate),
            Text(probe.verdict.value, style=_STYLES[probe.verdict]),
            percent(probe.attainment),
            f"[{percent(probe.low)}, {percent(probe.high)}]",
            number(point.good_rate),
            number(point.figures["ttft_p99"]),
            number(point.figures["tpot_p99"]),
        ]
        table.add_row(*cells, *([bar] if wide else []))
    return table
