"""All traffic is denied but the paths that Baton needs."""

from __future__ import annotations

import pytest

from tests.deploy.chart import CASES, Object, case, render, render_with, values_of

KUBE_SYSTEM = {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}
MONITORING = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}


def _rules(policy: Object, way: str) -> list[tuple[frozenset[str], list[tuple[int, int]]]]:
    """Components (`*`: any) and port ranges of a policy's rules; a rule for other peers has no components."""
    found = []
    for rule in policy["spec"].get(way, ()):
        everyone = {"*"} if not {"from", "to"} & set(rule) else set()
        components = {
            value
            for peer in rule.get("from" if way == "ingress" else "to", ())
            for expression in peer.get("podSelector", {}).get("matchExpressions", ())
            for value in expression["values"]
        } | everyone
        ports = [(port["port"], port.get("endPort", port["port"])) for port in rule.get("ports", ())]
        found.append((frozenset(components), ports))
    return found


def _allowed(policies: dict[str, Object], caller: str, callee: str, port: int) -> bool:
    """True if pods of one component reach a port of another by the rules of both."""

    def opens(policy: Object, way: str, other: str) -> bool:
        return any(
            {other, "*"} & components and (not ports or any(low <= port <= high for low, high in ports))
            for components, ports in _rules(policy, way)
        )

    leaves = opens(policies[f"demo-baton-{caller}"], "egress", callee)
    return leaves and opens(policies[f"demo-baton-{callee}"], "ingress", caller)


@pytest.mark.parametrize("name", CASES)
def test_every_pod_is_denied_by_default_and_has_a_policy_of_its_own(name: str) -> None:
    policies = case(name).of_kind("NetworkPolicy")
    (default,) = [policy for policy in policies if policy.endswith("-default")]
    selected = policies[default]["spec"]["podSelector"]["matchLabels"]
    assert policies[default]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    for template in case(name).templates().values():
        labels = template["metadata"]["labels"]
        assert selected.items() <= labels.items()
        own = [
            policy
            for policy in policies.values()
            if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        ]
        assert len(own) == 2
        assert all(policy["spec"]["policyTypes"] == ["Ingress", "Egress"] for policy in own)


def test_default_lets_out_names_only() -> None:
    spec = case("default").one("NetworkPolicy", "demo-baton-default")["spec"]
    assert "ingress" not in spec
    (dns,) = spec["egress"]
    assert dns["to"][0] == {"namespaceSelector": KUBE_SYSTEM}
    assert {port["port"] for port in dns["ports"]} == {53, 5353}


@pytest.mark.parametrize(
    ("caller", "callee", "port"),
    [
        ("test", "router", 8000),
        ("test", "router", 50051),
        ("router", "prefill", 50060),
        ("router", "decode", 50060),
        ("prefill", "decode", 50100),
        ("prefill", "decode", 50140),
        ("router", "redis", 6379),
        ("prefill", "redis", 6379),
        ("decode", "redis", 6379),
    ],
)
def test_paths_that_are_needed(caller: str, callee: str, port: int) -> None:
    assert _allowed(case("split").of_kind("NetworkPolicy"), caller, callee, port)


@pytest.mark.parametrize(
    ("caller", "callee", "port"),
    [
        ("test", "decode", 50060),
        ("test", "redis", 6379),
        ("router", "decode", 8001),
        ("router", "decode", 50100),
        ("router", "decode", 9400),
        ("prefill", "decode", 50060),
        ("prefill", "decode", 22),
        ("decode", "router", 8000),
        ("decode", "router", 50051),
        ("redis", "router", 8000),
    ],
)
def test_paths_that_are_not(caller: str, callee: str, port: int) -> None:
    assert not _allowed(case("split").of_kind("NetworkPolicy"), caller, callee, port)


def test_admin_port_is_open_to_monitoring_and_nodes_alone() -> None:
    for component, last in (("router", 8001), ("workers", 9415)):
        policy = case("model-hub").one("NetworkPolicy", f"demo-baton-{component}")
        (rule,) = [
            rule
            for rule in policy["spec"]["ingress"]
            if any(port["port"] <= 8001 <= port.get("endPort", port["port"]) for port in rule["ports"])
        ]
        assert rule["from"] == [{"namespaceSelector": MONITORING}, {"ipBlock": {"cidr": "10.0.0.0/16"}}]
        assert max(port.get("endPort", port["port"]) for port in rule["ports"]) == last


def test_admin_service_is_on_loopback_and_in_no_service_or_policy() -> None:
    rendered = case("default")
    assert rendered.config("router")["router"]["admin_host"] == "127.0.0.1"
    assert rendered.config("router")["router"]["admin_grpc_port"] == 50052
    shown = str(
        [made for made in rendered.objects if made["kind"] in ("Service", "NetworkPolicy", "Deployment")]
    )
    assert "50052" not in shown


def test_public_ports_are_open_to_all_or_to_named_clients() -> None:
    first = case("default").one("NetworkPolicy", "demo-baton-router")["spec"]["ingress"][0]
    assert "from" not in first
    named = case("outside").one("NetworkPolicy", "demo-baton-router")["spec"]["ingress"][0]
    assert named["from"][0] == values_of("outside")["networkPolicy"]["clients"][0]
    assert "test" in str(named["from"][1])


def test_nccl_opens_the_ports_that_it_chooses_between_workers_alone() -> None:
    policies = case("split-nccl-rdma").of_kind("NetworkPolicy")
    assert _allowed(policies, "prefill", "decode", 33333)
    assert not _allowed(policies, "router", "decode", 33333)


def test_only_a_model_of_a_hub_lets_pods_out_to_the_internet() -> None:
    def outside(name: str, component: str) -> list[Object]:
        policy = case(name).one("NetworkPolicy", f"demo-baton-{component}")
        return [rule for rule in policy["spec"]["egress"] if "0.0.0.0/0" in str(rule)]

    assert [rule["ports"] for rule in outside("model-hub", "workers")] == [[{"port": 443}]]
    assert [rule["ports"] for rule in outside("model-hub", "router")] == [[{"port": 443}]]
    assert outside("default", "workers") == []


def test_own_redis_is_reached_at_its_port_and_peers() -> None:
    rendered = render_with(
        "default",
        redis={"existingSecret": "r", "port": 6380},
        networkPolicy={"redis": [{"ipBlock": {"cidr": "10.1.0.0/24"}}]},
    )
    rules = rendered.one("NetworkPolicy", "demo-baton-workers")["spec"]["egress"]
    assert {"to": [{"ipBlock": {"cidr": "10.1.0.0/24"}}], "ports": [{"port": 6380}]} in rules


def test_the_head_of_ray_alone_reaches_a_redis_of_its_own() -> None:
    own = {"redisAddress": "rediss://redis.data:6390", "existingSecret": "r"}
    policies = render_with("kuberay", kuberay__gcsFaultTolerance=own).of_kind("NetworkPolicy")
    rule = {"ports": [{"port": 6390}]}
    reaching = {name for name, policy in policies.items() if rule in policy["spec"].get("egress", [])}
    assert reaching == {"demo-baton-ray-head"}


def test_valkey_calls_no_other_pod() -> None:
    assert "egress" not in case("default").one("NetworkPolicy", "demo-baton-redis")["spec"]


def test_ray_pods_reach_each_other_and_are_reached_by_no_others() -> None:
    policies = case("ray").of_kind("NetworkPolicy")
    for caller, callee in (("workers", "ray-head"), ("ray-head", "workers"), ("supervisor", "workers")):
        assert _allowed(policies, caller, callee, 23456)
    assert not _allowed(policies, "router", "ray-head", 6379)
    assert not _allowed(policies, "test", "ray-head", 6379)


def test_extra_rules_are_everyones() -> None:
    spec = case("placement").one("NetworkPolicy", "demo-baton-default")["spec"]
    assert spec["ingress"] == [{"ports": [{"port": 9999}]}]
    assert {"ports": [{"port": 4317}]} in spec["egress"]


def test_policies_can_be_left_out() -> None:
    assert render({"networkPolicy": {"enabled": False}}).of_kind("NetworkPolicy") == {}


def test_a_second_release_of_the_cluster_is_let_in() -> None:
    policy = case("second-pool").one("NetworkPolicy", "demo-v2-workers")
    peer = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert peer == {"baton/cluster": "chat"}


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://collector.observability:4318", 4318),
        ("https://[fd00::1]:4319/otlp", 4319),
        ("https://collector.example.com", 443),
        ("http://collector/v1/traces", 80),
    ],
)
def test_traces_open_the_port_of_their_collector(endpoint: str, port: int) -> None:
    """The port is open to routers and workers, to any address or to named peers."""
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observability"}}}
    for peers in ([], [peer]):
        rendered = render_with("split", tracing={"endpoint": endpoint}, networkPolicy={"collector": peers})
        policies = rendered.of_kind("NetworkPolicy")
        for component in ("router", "prefill", "decode"):
            wanted = {"ports": [{"port": port}], **({"to": peers} if peers else {})}
            assert wanted in policies[f"demo-baton-{component}"]["spec"]["egress"]
        assert wanted not in policies["demo-baton-test"]["spec"]["egress"]


def test_without_traces_no_such_port_is_open() -> None:
    before, after = case("split"), render_with("split", tracing={"sampleRatio": 0.5})
    assert before.of_kind("NetworkPolicy") == after.of_kind("NetworkPolicy")
    assert "tracing" not in before.config("router")
