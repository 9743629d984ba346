"""Alert rules: each fires and does not fire as its series say, tells its cluster, and has a section."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart

from tests.deploy import tools
from tests.deploy.chart import CHART, Object, Rendered, case, load_yaml, objects_in, values_of

SERIES: list[Object] = load_yaml((Path(__file__).parent / "alert_series.yaml").read_text(encoding="utf-8"))
PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
MODEL = 'namespace="llm",model="baton-demo"'
LABELS = {
    "$M": MODEL,
    "$P": 'namespace="llm",job="demo-baton-headless"',
    "$K": 'namespace="llm",pod="demo-baton-prefill-abc-1"',
}


def _rules(rendered: Rendered) -> list[Object]:
    rules: list[Object] = rendered.one("PrometheusRule", "demo-baton-alerts")["spec"]["groups"][0]["rules"]
    return rules


def _input(series: dict[str, str]) -> list[dict[str, str]]:
    found = []
    for name, values in series.items():
        for short, labels in LABELS.items():
            name = name.replace(short, labels)
        # `5x10` is promtool's for a value that stays.
        found.append({"series": name, "values": re.sub(r"(^| )([0-9.]+)x", r"\1\2+0x", values)})
    return found


def _tests(rules: dict[str, Object]) -> list[Object]:
    made = []
    for one in SERIES:
        rule = rules[one["alert"]]
        summary = f"baton-demo (release demo, namespace llm): {one['summary']}"
        notes = {"summary": summary, "runbook_url": rule["annotations"]["runbook_url"]}
        fired = {"exp_labels": rule["labels"] | one.get("labels", {}), "exp_annotations": notes}
        for name, expected in (("fires", [fired]), ("silent", [])):
            if name in one:
                asked = {"eval_time": one["at"], "alertname": one["alert"], "exp_alerts": expected}
                made.append(
                    {
                        "name": f"{one['alert']} {name}",
                        "interval": "30s",
                        "input_series": _input(one[name]),
                        "alert_rule_test": [asked],
                    }
                )
    return made


def _promtool(folder: Path, rules: list[Object], tests: list[Object]) -> subprocess.CompletedProcess[str]:
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "30s", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(document))
    command = [str(tools.promtool()), "test", "rules", "tests.yaml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_alert_fires_and_is_silent_as_its_series_say(tmp_path: Path) -> None:
    rules = _rules(case("monitoring"))
    done = _promtool(tmp_path, rules, _tests({rule["alert"]: rule for rule in rules}))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_series_that_does_not_fire_is_noticed(tmp_path: Path) -> None:
    """The proof that the test above can fail: rules that are never true."""
    rules = [rule | {"expr": f"({rule['expr']}) > 1e9"} for rule in _rules(case("monitoring"))]
    done = _promtool(tmp_path, rules, _tests({rule["alert"]: rule for rule in rules}))
    assert done.returncode != 0


def test_every_alert_has_series_with_which_it_fires_and_series_with_which_it_does_not() -> None:
    alerts = {rule["alert"] for rule in _rules(case("monitoring"))}
    assert {one["alert"] for one in SERIES} == alerts
    assert {one["alert"] for one in SERIES if "silent" in one} == alerts


def test_alerts_of_two_clusters_are_two() -> None:
    """No rule of one has the labels of a rule of the other, nor its summary."""

    def rules(release: str, namespace: str, model: str) -> list[Any]:
        values = values_of("monitoring") | {
            "model": {"source": "hub", "servedName": model, "hub": {"id": "a/b"}}
        }
        with Chart.load(CHART) as chart:
            texts = chart.render(values, name=release, namespace=namespace)
        made = list(objects_in(texts["baton/templates/monitoring/alerts.yaml"]))
        (found,) = [one["spec"]["groups"][0]["rules"] for one in made if one["kind"] == "PrometheusRule"]
        return [(one["alert"], one["labels"], one["annotations"]["summary"]) for one in found]

    clusters = [("a", "llm", "m"), ("b", "llm", "m"), ("a", "other", "m"), ("a", "llm", "n")]
    sets = [rules(*cluster) for cluster in clusters]
    for number, first in enumerate(sets):
        for second in sets[number + 1 :]:
            for (_, labels, summary), (_, others, other_summary) in zip(first, second, strict=True):
                assert labels != others
                assert summary != other_summary


def test_every_alert_has_a_section_of_the_page_of_troubleshooting() -> None:
    headings = {
        line.removeprefix("### ").lower()
        for line in PAGE.read_text("utf-8").splitlines()
        if line[:4] == "### "
    }
    for rule in _rules(case("monitoring")):
        page, _, section = rule["annotations"]["runbook_url"].partition("#")
        assert page.endswith("/docs/troubleshooting.md")
        assert section == rule["alert"].lower()
        assert section in headings
