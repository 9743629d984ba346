"""PodDisruptionBudgets, HorizontalPodAutoscaler and ScaledObjects of the chart."""

from __future__ import annotations

from tests.deploy.chart import Object, case, render, render_with


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


def _triggers(name: str, component: str) -> dict[str, Object]:
    triggers = case(name).one("ScaledObject", f"demo-baton-{component}")["spec"]["triggers"]
    return {trigger.get("name", trigger["type"]): trigger for trigger in triggers}


def test_prefill_scales_by_what_is_asked_and_decode_by_what_is_scarce() -> None:
    prefill, decode = _triggers("scaling", "prefill"), _triggers("scaling", "decode")
    assert set(prefill) == {"prefill-demand", "prefill-held", "cron"}
    assert set(decode) == {"decode-demand", "decode-held"}
    assert "baton_router_demand_prefill_seconds" in prefill["prefill-demand"]["metadata"]["query"]
    assert prefill["prefill-demand"]["metadata"]["threshold"] == "0.6"
    asked = decode["decode-demand"]["metadata"]["query"]
    for metric in ("free_slots", "free_blocks"):
        assert f"baton_worker_{metric}" in asked
    assert "baton_router_demand_requests" in asked
    assert decode["decode-demand"]["metadata"]["threshold"] == "0.75"
    for role, triggers in (("prefill", prefill), ("decode", decode)):
        spec = case("scaling").one("ScaledObject", f"demo-baton-{role}")["spec"]
        assert spec["scaleTargetRef"]["name"] == f"demo-baton-{role}"
        assert "replicas" not in case("scaling").one("Deployment", f"demo-baton-{role}")["spec"]
        held = triggers[f"{role}-held"]["metadata"]
        assert f'role="{role}"' in held["query"]
        assert held["threshold"] == "1"
        for trigger in (triggers[f"{role}-demand"], triggers[f"{role}-held"]):
            assert trigger["metadata"]["serverAddress"] == "https://prometheus.example.com"
            assert trigger["authenticationRef"] == {"name": "prometheus"}
            assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert case("scaling").one("ScaledObject", "demo-baton-prefill")["spec"]["fallback"]["replicas"] == 4


def test_groups_scale_by_both_and_count_their_workers() -> None:
    spec = case("scaling-node").one("ScaledObject", "demo-baton-workers")["spec"]
    assert [(trigger["name"], trigger["metadata"]["threshold"]) for trigger in spec["triggers"]] == [
        ("prefill-demand", "0.7"),
        ("prefill-held", "1"),
        ("decode-demand", "2.4"),
        ("decode-held", "3"),
    ]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 6)
