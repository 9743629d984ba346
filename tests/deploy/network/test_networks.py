"""Networks that are not plain IPv4: IPv6, dual stack, DNS of other distributions, proxies, own Redis."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.chart import Object, case, render, render_with


def _egress(rendered: Any, component: str) -> list[Object]:
    rules: list[Object] = rendered.one("NetworkPolicy", f"demo-baton-{component}")["spec"]["egress"]
    return rules


def _ports(rule: Object) -> set[int]:
    return {port["port"] for port in rule["ports"]}


def test_public_ports_listen_on_both_families() -> None:
    assert case("default").config("router")["router"]["host"] == "::"


@pytest.mark.parametrize("name", ["split", "ray", "kuberay"])
def test_all_services_have_the_families_that_are_wanted(name: str) -> None:
    wanted = {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"]}
    for service in render_with(name, cluster=wanted).of_kind("Service").values():
        assert wanted.items() <= service["spec"].items()
    for service in case(name).of_kind("Service").values():
        assert not {"ipFamilyPolicy", "ipFamilies"} & set(service["spec"])


def test_names_are_resolved_on_openshift_and_by_a_cache_on_the_node() -> None:
    (rule,) = case("default").one("NetworkPolicy", "demo-baton-default")["spec"]["egress"]
    namespaces = [
        peer["namespaceSelector"]["matchLabels"] for peer in rule["to"] if "namespaceSelector" in peer
    ]
    assert {"kubernetes.io/metadata.name": "openshift-dns"} in namespaces
    assert {"ipBlock": {"cidr": "169.254.0.0/16"}} in rule["to"]
    assert {(port["protocol"], port["port"]) for port in rule["ports"]} == {
        (protocol, port) for protocol in ("UDP", "TCP") for port in (53, 5353)
    }
    own = {"namespaces": ["dns"], "cidrs": ["10.96.0.10/32"], "ports": [1053]}
    (rule,) = render_with("default", networkPolicy__dns=own).one("NetworkPolicy", "demo-baton-default")[
        "spec"
    ]["egress"]
    assert _ports(rule) == {1053}
    assert rule["to"][1] == {"ipBlock": {"cidr": "10.96.0.10/32"}}


@pytest.mark.parametrize(
    ("environment", "ports"),
    [
        ({}, {443}),
        ({"HTTPS_PROXY": "http://proxy.corp:3128"}, {443, 3128}),
        ({"https_proxy": "proxy.corp:8080"}, {443, 8080}),
        ({"HF_ENDPOINT": "https://mirror.corp:8443/hf"}, {443, 8443}),
        ({"HF_ENDPOINT": "http://mirror.corp"}, {443, 80}),
        ({"HF_ENDPOINT": "http://[fd00::5]:8081", "HTTP_PROXY": "http://u:p@proxy:9"}, {443, 8081, 9}),
        ({"OTHER": "http://other:1"}, {443}),
    ],
)
def test_mirrors_and_proxies_of_a_hub_are_reached_at_their_ports(
    environment: dict[str, str], ports: set[int]
) -> None:
    variables = [{"name": name, "value": value} for name, value in environment.items()]
    rendered = render_with("model-hub", pod__extraEnv=variables, networkPolicy__hubPorts=[7])
    for component in ("router", "workers"):
        (rule,) = [one for one in _egress(rendered, component) if "0.0.0.0/0" in str(one)]
        assert _ports(rule) == ports | {7}


@pytest.mark.parametrize(
    ("redis", "ports"),
    [
        ({"url": "redis://redis.data"}, {6379}),
        ({"url": "redis://redis.data:6380/0"}, {6380}),
        ({"url": "rediss://[fd00::1]:6390/0?ssl_ca_certs=/a:1"}, {6390}),
        ({"url": "redis+sentinel://a:26379,b:26380,c/name/0"}, {26379, 26380, 6379}),
        ({"url": "redis+cluster://a:7000,b:7001"}, {7000, 7001, 6379}),
        ({"existingSecret": "r"}, {6379}),
        ({"existingSecret": "r", "port": 6390}, {6390}),
    ],
)
def test_own_redis_is_reached_at_the_ports_of_its_url(redis: dict[str, Any], ports: set[int]) -> None:
    rendered = render({"redis": redis})
    for component in ("router", "workers"):
        assert ports in [_ports(rule) for rule in _egress(rendered, component) if "to" not in rule]


def test_a_load_balancer_keeps_addresses_of_clients_and_has_its_class_and_ports() -> None:
    service = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "loadBalancerClass": "example.com/lb",
        "httpNodePort": 30080,
        "grpcNodePort": 30051,
    }
    spec = render_with("default", router__service=service).one("Service")["spec"]
    assert (spec["externalTrafficPolicy"], spec["loadBalancerClass"]) == ("Local", "example.com/lb")
    assert [port["nodePort"] for port in spec["ports"]] == [30080, 30051]
    inside = render_with("default", router__service={**service, "type": "ClusterIP"}).one("Service")["spec"]
    assert not {"externalTrafficPolicy", "loadBalancerClass"} & set(inside)
    assert all("nodePort" not in port for port in inside["ports"])


def test_pods_of_openshift_have_the_ids_of_their_namespace() -> None:
    ids = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    for spec in render_with("default", pod__podSecurityContext=ids).pods().values():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert not set(ids) & set(spec["securityContext"])
