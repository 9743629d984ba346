"""A comparison as an HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np

from loadgen.analysis.comparison import DIFFERENCE_FORMULA, Difference
from loadgen.analysis.metrics import tpot, ttft
from loadgen.analysis.run_folder import Run
from loadgen.common.formatting import interval, number
from loadgen.common.record import Outcome, Record
from loadgen.reports.descriptions import limit_words, load_words
from loadgen.reports.page import charts, heading, page, section, table
from loadgen.reports.scales import Scale, around_log
from loadgen.reports.svg import Chart

_STYLES = ("blue", "orange", "teal", "purple", "red", "grey")


def comparison_page(runs: Sequence[Run], compared: Mapping[str, Sequence[Difference]]) -> str:
    """The page: distributions of all runs, then every difference from the first."""
    lines = [
        f"{run.path.name}: {load_words(run.settings.load)}; {limit_words(run.settings)}"
        + ("" if run.summary.valid else "; INVALID")
        for run in runs
    ]
    parts = [
        heading("Comparison", "", "", lines),
        section("Distributions", charts([_shares(runs, "TTFT", ttft), _shares(runs, "TPOT", tpot)])),
        *(
            section(f"{runs[0].path.name} → {path.rpartition('/')[2]}", _table(some))
            for path, some in compared.items()
        ),
        f'<p class="soft">{escape(DIFFERENCE_FORMULA)}</p>',
    ]
    return page("Comparison", parts)


def difference_cells(one: Difference) -> list[str]:
    """Name with unit, first, second, difference, and its interval."""
    scale = 100 if one.unit == "share" else 1
    unit = {"share": "%", "ms": "ms"}.get(one.unit, "")
    low, high = (None if end is None else end * scale for end in (one.low, one.high))
    figures = (number(value * scale) for value in (one.first, one.second, one.second - one.first))
    return [f"{one.name} {unit}", *figures, interval(low, high)]


def _shares(runs: Sequence[Run], title: str, of: Callable[[Record], float | None]) -> Chart | None:
    each = {
        run.path.name: np.sort(
            [v * 1e3 for r in run.records if r.outcome == Outcome.OK and (v := of(r)) is not None]
        )
        for run in runs
    }
    values = [float(value) for one in each.values() for value in one]
    if not values:
        return None
    chart = Chart(title, around_log(values), Scale(0.0, 1.0), "ms", "share")
    for (name, ordered), style in zip(each.items(), _STYLES, strict=False):
        if len(ordered):
            places = np.unique(np.linspace(0, len(ordered) - 1, 300).astype(int))
            shares = (places + 1) / len(ordered)
            chart.line(
                list(zip(ordered[places].tolist(), shares.tolist(), strict=True)), style, name, steps=True
            )
    return chart


def _table(differences: Sequence[Difference]) -> str:
    rows = []
    for one in differences:
        change = "" if one.change is None else f"{one.change:+.1%}"
        mark = "<b>certain</b>" if one.certain else ""
        rows.append([*map(escape, difference_cells(one)), change, mark])
    return table(["", "first", "second", "difference", "95 %", "change", ""], rows)
