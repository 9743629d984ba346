"""Prints one run on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.analysis.quantities import Quantity
from loadgen.analysis.run_folder import Run
from loadgen.analysis.summary import Attainment, Summary
from loadgen.common.formatting import counts, interval, limits, number, percent
from loadgen.reports.descriptions import leak_words

# Style of a passed leak check, and of any other.
_LEAK_STYLES = {True: "dim", False: "yellow"}
SHOWN = ("50", "90", "95", "99", "99.9")


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
    parts.append(Text(_rates_line(summary)))
    parts.append(Text(_window_line(summary), style="dim"))
    parts += [Text(line) for line in attainment_lines(summary)]
    parts.append(_table(summary, wide=width >= 110))
    return parts


def _counts_line(summary: Summary) -> str:
    line = f"{summary.due} requests, failed: {counts(summary.failed)}"
    if summary.cancelled:
        line += f"; cancelled by their client: {summary.cancelled}"
    if summary.mismatches:
        line += f"; wrong token counts: {sum(summary.mismatches.values())}"
    return line


def _rates_line(summary: Summary) -> str:
    rates = summary.rates
    return (
        f"per second: {number(rates.offered)} due, {number(rates.sent)} sent, "
        f"{number(rates.ended_well)} succeeded; "
        f"tokens {number(rates.input_tokens)} in, {number(rates.output_tokens)} out"
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
    lines = [_attainment(summary.attainment, "attainment", summary.rates.good)]
    lines += [_attainment(one, f"  {name}", None) for name, one in summary.classes.items()]
    return lines


def _attainment(one: Attainment, name: str, good_rate: float | None) -> str:
    ends = f"[{percent(one.share.low)}, {percent(one.share.high)}]"
    line = f"{name} {percent(one.share.value)} {ends} of {one.judged} within {limits(one.limits_ms)}"
    if good_rate is not None:
        verdict = "met" if one.share.value >= one.goal else "missed"
        line += f"; goal {percent(one.goal)}: {verdict}; {number(good_rate)} good per second"
    return line


def _table(summary: Summary, *, wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
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
