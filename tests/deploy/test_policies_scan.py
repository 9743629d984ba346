"""A scan of the rendered production values finds nothing that is not explained here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy import tools
from tests.deploy.chart import CHART, Rendered, Values, case, render, values_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Check, words of the resource (empty: any), and why it is as it is.
EXPLAINED = (
    (
        "CKV_K8S_11",
        "",
        "No limit of CPU: at its limit a process stands still for the rest of 100 ms, the time of ten tokens."
        " Requests reserve the cores; memory has limits.",
    ),
    ("CKV_K8S_8", "Pod.llm.demo-baton-test", "The test runs once and ends; nothing restarts it."),
    ("CKV_K8S_9", "Pod.llm.demo-baton-test", "The test has no callers."),
)
# With rdma.ipcLock alone, which is off by default.
EXPLAINED_OF_RDMA = (
    ("CKV_K8S_25", "-prefill", "RDMA pins memory, for which IPC_LOCK is needed where that limit is low."),
    ("CKV_K8S_25", "-decode", "The same."),
)


@pytest.mark.parametrize("name", ["production", "kuberay-production", "h200-70b"])
def test_scan_of_production_values(name: str, tmp_path: Path) -> None:
    rendered = _h200_70b() if name == "h200-70b" else case(name)
    manifest = tmp_path / "production.yaml"
    manifest.write_text(yaml.safe_dump_all(rendered.objects), encoding="utf-8")
    done = subprocess.run(
        [
            *(str(tools.checkov()), "--framework", "kubernetes", "--file", str(manifest)),
            *("--output", "json", "--compact", "--quiet", "--skip-download"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 100
    found = {(failed["check_id"], failed["resource"]) for failed in report["results"]["failed_checks"]}
    explanations = EXPLAINED + (EXPLAINED_OF_RDMA if name == "h200-70b" else ())
    explained = {
        (check, words): {one for one in found if one[0] == check and words in one[1]}
        for check, words, _ in explanations
    }
    assert found == set().union(*explained.values())
    assert all(explained.values()), "explained, and not found any more"


def _h200_70b() -> Rendered:
    """values-h200-70b.yaml with values-production.yaml over it, as `helm install -f … -f …` merges them."""
    values: Values = {}
    for file in ("values-h200-70b.yaml", "values-production.yaml"):
        _merge(values, yaml.safe_load((CHART / file).read_text(encoding="utf-8")))
    _merge(values, {"image": values_of("production")["image"]})
    return render(values)


def _merge(values: Values, over: Values) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value
