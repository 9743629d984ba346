"""Charts of the server's own metrics over the run's time: one chart per metric, one line per source."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.common.server_samples import Sample
from loadgen.reports.scales import Scale, around
from loadgen.reports.svg import Chart

_STYLES = ("blue", "orange", "teal", "purple", "red", "grey")
# Shown first; others follow as far as there is space.
_FIRST = (
    re.compile(r"(running|waiting) requests|num_requests_(running|waiting)|num_(running|queue)_reqs"),
    re.compile(r"free_slots|slots|kv_cache_usage|token_usage|free_blocks"),
    re.compile(r"queued_prefill|queue"),
    re.compile(r"tokens_total|decode_steps_total|step_seconds"),
    re.compile(r"bytes_total|handoffs|transfer"),
)
_MOST_CHARTS = 16


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one source; of a counter its increase per second."""

    name: str
    source: str
    points: list[tuple[float, float]]


def server_charts(samples: Sequence[Sample], seconds: float) -> list[Chart]:
    """The charts of metrics that changed, the most relevant first."""
    by_name: dict[str, list[Series]] = {}
    for series in all_series(samples):
        if len({value for _, value in series.points}) > 1:
            by_name.setdefault(series.name, []).append(series)
    names = sorted(by_name, key=lambda name: (_rank(name), name))[:_MOST_CHARTS]
    return [_chart(name, by_name[name], seconds) for name in names]


def all_series(samples: Sequence[Sample]) -> list[Series]:
    """Values by metric and source, ordered by time."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for sample in sorted(samples, key=lambda one: one.at):
        for name, value in sample.values.items():
            points.setdefault((_bare(name), f"{sample.source}{_labels(name)}"), []).append((sample.at, value))
    found: list[Series] = []
    for (name, source), values in points.items():
        if name.endswith(("_total", "_sum", "_count")):
            found.append(Series(f"{name} a second", source, _growth(values)))
        else:
            found.append(Series(name, source, values))
    return found


def _growth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [
        (until, max(0.0, (after - before) / (until - since)))
        for (since, before), (until, after) in itertools.pairwise(points)
        if until > since
    ]


def _chart(name: str, series: list[Series], seconds: float) -> Chart:
    values = [value for one in series for _, value in one.points]
    chart = Chart(name, Scale(0.0, seconds), around(values), "s since the start", "", height=220)
    for one, style in zip(series, _STYLES, strict=False):
        inside = [(at, value) for at, value in one.points if 0 <= at <= seconds]
        chart.line(inside, style, one.source)
    return chart


def _rank(name: str) -> int:
    return next((place for place, form in enumerate(_FIRST) if form.search(name)), len(_FIRST))


def _bare(name: str) -> str:
    return name.partition("{")[0]


def _labels(name: str) -> str:
    """The labels that distinguish series of the same source."""
    labels = name.partition("{")[2].rstrip("}")
    own = [
        one
        for one in labels.split(",")
        if one and one.partition("=")[0] not in ("worker", "role", "model", "model_name")
    ]
    return f" {','.join(own)}" if own else ""
