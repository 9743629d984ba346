"""Monitors, dashboards and alert rules, and that they name metrics that are exported."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import promql_parser
import pytest
import yaml

from services.common.observability.histogram import EXPORTED_SECONDS
from tests.deploy.chart import CHART, Object, case, render, render_with
from tools.metrics_page import FAMILIES

ROOT = Path(__file__).parents[2]
# Of Prometheus itself, and of kube-state-metrics.
FOREIGN = {
    "up",
    "kube_pod_container_status_restarts_total",
    "kube_pod_container_status_waiting_reason",
}
SUFFIXES = ("_bucket", "_sum", "_count")


@cache
def _exported() -> set[str]:
    """Names of metrics in the code of routers and workers."""
    names = {metric.name for families in FAMILIES.values() for metric in families}
    processes = {"process_resident_memory_bytes", "engine_process_resident_memory_bytes"}
    processes |= {"process_start_time_seconds"}
    return names | {name + suffix for name in names for suffix in SUFFIXES} | processes | FOREIGN


def _metrics(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:baton_\w+|(?:engine_)?process_\w+|kube_\w+|up)(?=\{)", expression))


def _dashboards() -> dict[str, Object]:
    found = {}
    for name, made in case("monitoring").of_kind("ConfigMap").items():
        if "-dashboard-" in name:
            (text,) = made["data"].values()
            found[name] = json.loads(text)
    return found


def _rules() -> list[Object]:
    rules: list[Object] = case("monitoring").one("PrometheusRule", "demo-baton-alerts")["spec"]["groups"][0][
        "rules"
    ]
    return rules


def _expressions() -> list[str]:
    panels = [panel for board in _dashboards().values() for panel in board["panels"]]
    drawn = [target["expr"] for panel in panels for target in panel["targets"]]
    triggers = [
        trigger["metadata"]["query"]
        for name in ("scaling", "scaling-node")
        for scaled in case(name).of_kind("ScaledObject").values()
        for trigger in scaled["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    ]
    return [*drawn, *(rule["expr"] for rule in _rules()), *triggers]


def test_expressions_name_metrics_that_are_exported() -> None:
    for expression in _expressions():
        assert _metrics(expression), expression
        assert _metrics(expression) <= _exported(), expression
        assert 'namespace="llm"' in expression
        assert "$model" not in expression
        promql_parser.parse(expression.replace("$__rate_interval", "5m"))


def test_bound_of_a_good_first_token_is_a_bucket() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    bounds = schema["properties"]["monitoring"]["properties"]["alerts"]["properties"]["ttftSeconds"]["enum"]
    assert set(bounds) <= set(EXPORTED_SECONDS)
    slow = next(rule for rule in _rules() if rule["alert"] == "BatonSlowFirstTokens")
    assert 'le=~"1|1.0"' in slow["expr"]
    assert "> 6 * 0.005" in slow["expr"]


def test_alerts_cover_budget_leaks_and_slow_workers() -> None:
    names = {rule["alert"] for rule in _rules()}
    assert {"BatonErrorBudgetBurnsFast", "BatonKVBlocksLeak", "BatonTicketsLeak", "BatonSlowWorker"} <= names
    assert len(names) == len(_rules())
    for rule in _rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]


def test_rules_are_the_same_as_file_and_as_resource() -> None:
    made = case("monitoring").one("ConfigMap", "demo-baton-alerts")
    (text,) = made["data"].values()
    assert yaml.safe_load(text)["groups"][0]["rules"] == _rules()


def test_dashboards_are_for_grafanas_sidecar() -> None:
    boards = _dashboards()
    assert len(boards) == 3
    for name, board in boards.items():
        labels = case("monitoring").one("ConfigMap", name)["metadata"]["labels"]
        assert labels["grafana_dashboard"] == "1"
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        assert all(panel["targets"] for panel in board["panels"])
    assert len({board["uid"] for board in boards.values()}) == 3
    assert all(len(board["uid"]) <= 40 for board in boards.values())


def test_monitors_are_off_by_default() -> None:
    kinds = {made["kind"] for made in render({}).objects}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


@pytest.mark.parametrize(
    ("ray", "roles"), [(False, {"router", "workers"}), (True, {"router", "workers", "supervisor"})]
)
def test_service_monitors_select_one_service_a_role(ray: bool, roles: set[str]) -> None:
    rendered = render_with("monitoring", ray__enabled=ray)
    services = rendered.of_kind("Service").values()
    for name, monitor in rendered.of_kind("ServiceMonitor").items():
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [one for one in services if wanted <= one["metadata"]["labels"].items()]
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        assert wanted >= service["spec"]["selector"].items(), name
    assert set(rendered.of_kind("ServiceMonitor")) == {f"demo-baton-{role}" for role in roles}


@pytest.mark.parametrize("name", ["scaling-node", "ray"])
def test_pod_monitors_scrape_every_worker_of_a_pod(name: str) -> None:
    rendered = case(name)
    monitor = rendered.one("PodMonitor", "demo-baton-workers")["spec"]
    scraped = {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}
    ports = {port["name"] for port in rendered.container("demo-baton-workers")["ports"]}
    assert {port for port in ports if port.startswith("metrics-")} <= scraped <= ports
