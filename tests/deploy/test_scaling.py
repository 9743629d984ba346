"""PodDisruptionBudgets, HorizontalPodAutoscaler, ScaledObjects."""

from __future__ import annotations

from tests.deploy.chart import case, render, render_with


def test_budgets_of_routers_and_decode_by_default() -> None:
    assert set(case("split").of_kind("PodDisruptionBudget")) == {"demo-baton-router", "demo-baton-decode"}
    assert set(case("default").of_kind("PodDisruptionBudget")) == {"demo-baton-router", "demo-baton-workers"}
    for budget in case("split").of_kind("PodDisruptionBudget").values():
        assert budget["spec"]["maxUnavailable"] == 1


def test_budgets_can_be_changed() -> None:
    rendered = render_with(
        "split", prefill__pdb={"enabled": True, "maxUnavailable": "50%"}, router__pdb={"enabled": False}
    )
    budgets = rendered.of_kind("PodDisruptionBudget")
    assert set(budgets) == {"demo-baton-prefill", "demo-baton-decode"}
    assert budgets["demo-baton-prefill"]["spec"]["maxUnavailable"] == "50%"


def test_no_autoscaler_by_default() -> None:
    kinds = {made["kind"] for made in render({}).objects}
    assert not kinds & {"HorizontalPodAutoscaler", "ScaledObject"}


def test_routers_scale_by_cpu() -> None:
    rendered = case("scaling")
    spec = rendered.one("HorizontalPodAutoscaler", "demo-baton-router")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 5)
    assert spec["metrics"][0]["resource"]["target"]["averageUtilization"] == 60
    assert "replicas" not in rendered.one("Deployment", "demo-baton-router")["spec"]


def test_prefill_scales_by_queue_and_decode_by_slots() -> None:
    rendered = case("scaling")
    prefill = rendered.one("ScaledObject", "demo-baton-prefill")["spec"]
    decode = rendered.one("ScaledObject", "demo-baton-decode")["spec"]
    (queue,), (slots,) = prefill["triggers"], decode["triggers"]
    assert "baton_worker_queued_prefill_tokens" in queue["metadata"]["query"]
    assert queue["metadata"]["threshold"] == "0.25"
    assert "baton_worker_free_slots" in slots["metadata"]["query"]
    assert slots["metadata"]["threshold"] == "0.75"
    for role, spec in (("prefill", prefill), ("decode", decode)):
        assert spec["scaleTargetRef"]["name"] == f"demo-baton-{role}"
        assert spec["triggers"][0]["metadata"]["serverAddress"] == "https://prometheus.example.com"
        assert spec["triggers"][0]["authenticationRef"] == {"name": "prometheus"}
        assert f'role="{role}"' in spec["triggers"][0]["metadata"]["query"]
        assert 'model="baton-demo"' in spec["triggers"][0]["metadata"]["query"]
        assert "replicas" not in rendered.one("Deployment", f"demo-baton-{role}")["spec"]


def test_groups_scale_by_both_and_count_their_workers() -> None:
    spec = case("scaling-node").one("ScaledObject", "demo-baton-workers")["spec"]
    assert [(trigger["name"], trigger["metadata"]["threshold"]) for trigger in spec["triggers"]] == [
        ("prefill-queue-seconds", "0.5"),
        ("decode-slots", "2.4"),
    ]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 6)
