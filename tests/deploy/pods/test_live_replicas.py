"""Switching autoscaling on keeps the pods that there are, at every upgrade."""

from __future__ import annotations

import pytest
from helm_python import Chart, Config

from tests.deploy.chart import CHART, NOTES, Object, Values, case, objects_in
from tests.deploy.fake_api_server import serving

SCALED: Values = {
    "topology": "split",
    **{role: {"autoscaling": {"enabled": True}} for role in ("router", "prefill", "decode")},
}


def _deployment(name: str, replicas: int) -> dict[str, Object]:
    made = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "llm"},
        "spec": {"replicas": replicas},
    }
    return {f"namespaces/llm/deployments/{name}": made}


def _replicas(values: Values, live: dict[str, Object]) -> dict[str, int | None]:
    """Renders the chart where these objects exist; returns the replicas by Deployment."""
    with (
        serving(live) as url,
        Chart.load(CHART) as chart,
        Config(kube_apiserver=url, namespace="llm") as config,
    ):
        texts = config.render(chart, values, name="demo", namespace="llm", is_upgrade=True)
    made = [one for name, text in texts.items() if name != NOTES for one in objects_in(text)]
    return {
        one["metadata"]["name"].removeprefix("demo-baton-"): one["spec"].get("replicas")
        for one in made
        if one["kind"] == "Deployment"
    }


@pytest.mark.parametrize(("router", "prefill"), [(3, 4), (1, 0)])
def test_live_numbers_are_kept(router: int, prefill: int) -> None:
    """Also 0, with which KEDA is paused; a Deployment that is not there yet has none."""
    live = _deployment("demo-baton-router", router) | _deployment("demo-baton-prefill", prefill)
    assert _replicas(SCALED, live) == {"router": router, "prefill": prefill, "decode": None, "redis": 1}


def test_without_autoscaling_the_values_say() -> None:
    live = _deployment("demo-baton-prefill", 4)
    assert _replicas({"topology": "split", "prefill": {"replicas": 2}}, live)["prefill"] == 2


def test_without_an_api_server_the_field_is_left_out() -> None:
    for name in ("router", "prefill", "decode"):
        assert "replicas" not in case("scaling").one("Deployment", f"demo-baton-{name}")["spec"]
