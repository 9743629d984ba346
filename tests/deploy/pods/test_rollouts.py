"""Rollouts: what restarts pods, how long they may take, what a node drain may take away, claims."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart

from services.common.config.router import RouterSettings
from tests.deploy.chart import (
    CASES,
    CHART,
    NOTES,
    RELEASE,
    Rendered,
    case,
    objects_in,
    put,
    render_with,
    values_of,
)

IMAGES = {"router": {"tag": "1"}, "worker": {"digest": "sha256:" + "0" * 64}}


def _render_other_version(folder: Path, values: Any) -> Rendered:
    """Renders another version of the chart, which is otherwise the same."""
    shutil.copytree(CHART, folder)
    chart = yaml.safe_load((folder / "Chart.yaml").read_text(encoding="utf-8"))
    chart |= {"version": "9.9.9", "appVersion": "9.9.9"}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(chart), encoding="utf-8")
    with Chart.load(folder) as other:
        texts = other.render(values, name=RELEASE, namespace="llm")
    return Rendered(
        texts, tuple(one for name in sorted(texts) if name != NOTES for one in objects_in(texts[name]))
    )


@pytest.mark.parametrize(
    "name", ["kuberay", *(pytest.param(one, marks=pytest.mark.slow) for one in CASES if one != "kuberay")]
)
def test_another_chart_with_the_same_images_replaces_no_pod(name: str, tmp_path: Path) -> None:
    values = values_of(name)
    for image, named in IMAGES.items():
        for key, value in named.items():
            put(values, f"image.{image}.{key}", value)
    before = render_with(name, image=values["image"]).templates()
    after = _render_other_version(tmp_path / "baton", values).templates()
    assert before.keys() == after.keys()
    for pod, template in before.items():
        if not pod.endswith("-test"):
            assert template == after[pod], pod


@pytest.mark.parametrize("name", CASES)
def test_no_healthy_rollout_counts_as_failed(name: str) -> None:
    """An old pod ends before the new one begins to load, where none may be more."""
    load = values_of(name).get("modelLoadTimeout", 900)
    for deployment, made in case(name).of_kind("Deployment").items():
        grace = made["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        deadline = made["spec"]["progressDeadlineSeconds"]
        assert deadline >= grace + (load if not deployment.endswith("-redis") else 60), deployment


def test_waits_are_said_with_the_time_that_they_take() -> None:
    lifecycle = {"drainSeconds": 20, "longestGenerationSeconds": 300, "marginSeconds": 10}
    notes = render_with("default", lifecycle=lifecycle, modelLoadTimeout=200, workerGroup__replicas=3).notes
    # Three pods, each of which ends within 310 s and loads within 200 s, one after the other.
    assert "--timeout 1710s" in notes
    assert "--timeout=1710s" in notes


def test_what_happens_to_requests_while_the_only_pod_of_workers_is_replaced_is_said() -> None:
    said = f"Requests wait for it for {RouterSettings().queue_timeout_s:g} s"
    assert said in case("default").notes
    assert "the only pod of prefill" in render_with("split", prefill__replicas=1).notes
    assert said not in case("split").notes
    assert (
        "Requests wait for it for 1200 s"
        not in render_with("default", router__config={"queue_timeout_s": 1200}).notes
    )
    for changes in ({"workerGroup__replicas": 2}, {"workerGroup__maxSurge": 1}, {"modelLoadTimeout": 50}):
        assert "Requests wait for it" not in render_with("default", **changes).notes


@pytest.mark.parametrize("name", CASES)
def test_pods_that_are_never_ready_do_not_keep_a_node(name: str) -> None:
    for budget in case(name).of_kind("PodDisruptionBudget").values():
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_the_tests_pod_stays_for_its_log() -> None:
    """Helm 3 reads the log after it has deleted what a policy names."""
    made = case("default").one("Pod", "demo-baton-test")
    assert made["metadata"]["annotations"]["helm.sh/hook-delete-policy"] == "before-hook-creation"


def test_claims_of_the_charts_own() -> None:
    hub = {"id": "a/b", "cache": "pvc", "claimSize": "200Gi"}
    rendered = render_with(
        "model-hub",
        model={"source": "hub", "servedName": "m", "hub": hub},
        kernelCache={"type": "pvc", "claimSize": "2Gi"},
        **{"global": {"storageClass": "shared"}},
    )
    claims = rendered.of_kind("PersistentVolumeClaim")
    assert {name: one["spec"]["resources"]["requests"]["storage"] for name, one in claims.items()} == {
        "demo-baton-models": "200Gi",
        "demo-baton-kernels": "2Gi",
    }
    for claim in claims.values():
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
        assert claim["spec"]["storageClassName"] == "shared"
        assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    volumes = rendered.pods()["demo-baton-workers"]["volumes"]
    mounted = {one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one}
    assert mounted == set(claims)


def test_numbers_in_variables_are_written_as_texts() -> None:
    rendered = render_with(
        "default",
        nccl__env={"NCCL_IB_GID_INDEX": 3},
        pod__extraEnv=[{"name": "A", "value": 1.5}, {"name": "B", "value": True}],
    )
    values = {one["name"]: one.get("value") for one in rendered.container("demo-baton-workers")["env"]}
    assert (values["NCCL_IB_GID_INDEX"], values["A"], values["B"]) == ("3", "1.5", "true")
