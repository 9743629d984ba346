"""A scan of the rendered production values finds nothing that is not explained here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy import tools
from tests.deploy.chart import case

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


def test_scan_of_production_values(tmp_path: Path) -> None:
    manifest = tmp_path / "production.yaml"
    manifest.write_text(yaml.safe_dump_all(case("production").objects), encoding="utf-8")
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
    explained = {
        (check, words): {one for one in found if one[0] == check and words in one[1]}
        for check, words, _ in EXPLAINED
    }
    assert found == set().union(*explained.values())
    assert all(explained.values()), "explained, and not found any more"
