"""Metrics and labels that the chart's alerts, dashboards and scalers name, and what a process exports."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from services.cluster.group.metrics import group_registry
from services.cluster.group.probes import GroupProbes
from services.cluster.supervision.report import ClusterStatus, Phase, Report
from services.common.config.worker import WorkerConfig
from services.common.observability.metrics import render

ROOT = Path(__file__).parents[3]
FILES = ROOT / "deploy" / "helm" / "baton" / "files"
# What Helm made of the chart; tests/deploy checks that it still does.
RENDERED = ROOT / "tests" / "deploy" / "golden"

_METRIC = r"((?:baton|process|engine_process)_\w+)\{([^}]*)\}"
_MATCHER = re.compile(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"')
_GROUPED = re.compile(r"(?:by|on)\s*\(([^)]*)\)\s*\((?:\w+\()*" + _METRIC)
_LEGEND_LABEL = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")
# Labels that Prometheus adds to every series of a pod.
_OF_THE_POD = {"job", "namespace", "pod"}
# Words of Go's templates that stand alone as labels do.
_TEMPLATE_WORDS = {"else", "end"}


@dataclass
class Named:
    """Labels and functions with which expressions use one metric."""

    labels: set[str] = field(default_factory=set)
    values: dict[str, set[str]] = field(default_factory=dict)  # of matchers for equality, by label

    def add(self, matchers: str, others: Iterable[str] = ()) -> None:
        for label, operator, value in _MATCHER.findall(matchers):
            self.labels.add(label)
            if operator == "=":
                self.values.setdefault(label, set()).add(value)
        self.labels.update(others)


def named_in_rendered_charts() -> dict[str, Named]:
    """Every metric that the rendered chart names in a PromQL selector, with its labels."""
    found: dict[str, Named] = {}
    for file in RENDERED.glob("*.txt"):
        text = re.sub(r"\n[+ ]\s*", " ", file.read_text())
        for name, matchers in re.findall(_METRIC, text):
            found.setdefault(name, Named()).add(matchers)
        for labels, name, _ in _GROUPED.findall(text):
            found[name].labels.update(label.strip() for label in labels.split(",") if label.strip())
    for named in found.values():
        named.labels -= _OF_THE_POD
        named.values.pop("namespace", None)
    return found


def named_in_legends() -> dict[str, set[str]]:
    """Labels that legends and summaries show, by the first metric of their expression."""
    queries = [
        (query["expr"], query["legend"])
        for file in (FILES / "dashboards").glob("*.yaml")
        for panel in yaml.safe_load(file.read_text())["panels"]
        for query in panel["queries"]
    ]
    queries += [
        (rule["expr"], rule["summary"]) for rule in yaml.safe_load((FILES / "alerts.yaml").read_text())
    ]
    found: dict[str, set[str]] = {}
    for expression, legend in queries:
        metrics = re.findall(_METRIC, expression)
        if metrics:
            labels = set(_LEGEND_LABEL.findall(legend)) - _OF_THE_POD - _TEMPLATE_WORDS
            found.setdefault(metrics[0][0], set()).update(labels)
    return found


def exported(pages: Iterable[str]) -> dict[str, list[dict[str, str]]]:
    """The label sets of every series on pages of metrics, by name; none where a metric has no series yet."""
    found: dict[str, list[dict[str, str]]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
            for suffix in suffixes.get(family.type, [""]):
                found.setdefault(family.name + suffix, [])
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.labels)
    return found


def series_of(page: str) -> dict[str, set[str]]:
    """The labels of each metric on a page, all of whose series have the same."""
    return {name: {*series[0]} for name, series in exported([page]).items() if series}


def group_page() -> str:
    """The metrics page of a worker group with one worker."""
    worker = WorkerConfig(name="group-decode-0", role="decode", model="m")
    probes = GroupProbes([worker])
    probes.update(ClusterStatus(complete=True, reports={worker.name: Report(phase=Phase.STARTING, starts=1)}))
    return render(group_registry("group", "m", probes), "text/plain")[0].decode()
