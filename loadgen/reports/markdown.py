"""Runs, curves and comparisons as Markdown, for issues and pull requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loadgen.analysis.quantities import PERCENTILES
from loadgen.analysis.run_folder import Run
from loadgen.common.formatting import counts, interval, number, percent
from loadgen.goodput.curve import Curve
from loadgen.reports.console import attainment_lines, goodput_line
from loadgen.reports.descriptions import cache_words, leak_words, limit_words, load_words, prompt_words


def run_markdown(run: Run) -> str:
    """Returns the Markdown report of one run."""
    summary, settings = run.summary, run.settings
    window, throughput = summary.window, summary.throughput
    lines = [
        f"# {settings.target.model} at {settings.target.url}: {'valid' if summary.valid else '**INVALID**'}",
        "",
        *(f"- **{reason.text}**" for reason in summary.invalid),
        *(f"- {caution}" for caution in summary.cautions),
        f"- load: {load_words(settings.load)}",
        f"- {prompt_words(settings)}",
        *([f"- goal: {limit_words(settings)}"] if settings.judge.goodput else []),
        *(f"- {line.strip()}" for line in attainment_lines(summary)),
        f"- {summary.due} requests in the window of {number(window.since)} to {number(window.until)} s "
        f"({window.steadiness}); failed: {counts(summary.failed)}",
        f"- per second: {number(throughput.offered)} due, {number(throughput.ended_well)} succeeded, "
        f"{number(throughput.output_tokens)} output tokens",
        f"- {cache_words(summary)}",
        f"- {leak_words(run.about)}",
        "",
    ]
    head = ["ms", *(f"p{q:g}" for q in PERCENTILES), "max", "p99 is within", "formula"]
    rows = [
        [
            one.title,
            *(number(estimate.value) for estimate in one.percentiles.values()),
            number(one.max),
            interval(one.percentiles["99"].low, one.percentiles["99"].high),
            one.formula,
        ]
        for one in (*summary.quantities.values(), *summary.stages.values())
        if one.count
    ]
    lines += markdown_table(head, rows)
    lines += ["", *(f"{name}: {text}  " for name, text in summary.formulas.items())]
    return "\n".join(lines) + "\n"


def curve_markdown(curve: Curve) -> str:
    """A search or a sweep."""
    lines = [f"# {curve.kind} of {curve.target}", ""]
    lines += [f"- **INVALID: {reason}**" for reason in curve.invalid]
    if curve.kind == "search":
        lines += [f"- {goodput_line(curve)}", f"- {curve.formula}"]
    head = ["rate/s", "verdict", "attainment", "95 %", "good/s", "TTFT p99", "TPOT p99"]
    rows = [
        [
            number(point.probe.rate),
            str(point.probe.verdict),
            percent(point.probe.attainment),
            f"{percent(point.probe.low)} to {percent(point.probe.high)}",
            number(point.good_rate),
            number(point.figures["ttft_p99"]),
            number(point.figures["tpot_p99"]),
        ]
        for point in curve.points
    ]
    return "\n".join([*lines, "", *markdown_table(head, rows)]) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a comparison."""
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows),
    ]
