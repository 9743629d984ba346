"""Services, Ingresses, routes: how clients come in."""

from __future__ import annotations

import pytest

from tests.deploy.chart import case, render_with


def test_public_service_has_both_ports() -> None:
    spec = case("default").one("Service")["spec"]
    assert spec["type"] == "ClusterIP"
    assert [(port["name"], port["port"], port["appProtocol"]) for port in spec["ports"]] == [
        ("http", 80, "http"),
        ("grpc", 50051, "kubernetes.io/h2c"),
    ]
    secure = case("tls-own").one("Service")["spec"]["ports"]
    assert {port["appProtocol"] for port in secure} == {"https"}


def test_headless_service_for_clients_that_balance_themselves() -> None:
    spec = case("default").one("Service", "demo-baton-headless")["spec"]
    assert spec["clusterIP"] == "None"
    assert {"name": "grpc", "port": 50051, "targetPort": "grpc"} in spec["ports"]
    assert "dns:///demo-baton-headless.llm:50051" in case("default").notes


def test_load_balancer() -> None:
    service = case("outside").one("Service")
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    assert service["metadata"]["annotations"] == {"example.com/scheme": "internal"}


def test_ingresses() -> None:
    http = case("outside").one("Ingress")
    grpc = case("outside").one("Ingress", "demo-baton-grpc")
    assert http["spec"]["ingressClassName"] == grpc["spec"]["ingressClassName"] == "nginx"
    assert http["spec"]["tls"] == [{"secretName": "llm-tls", "hosts": ["llm.example.com"]}]
    assert "tls" not in grpc["spec"]
    assert grpc["metadata"]["annotations"]["nginx.ingress.kubernetes.io/limit-rps"] == "50"
    backends = [
        ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]["port"]["number"]
        for ingress in (http, grpc)
    ]
    assert backends == [80, 50051]


def test_routes_of_a_gateway() -> None:
    http = case("outside").one("HTTPRoute")["spec"]
    grpc = case("outside").one("GRPCRoute")["spec"]
    assert http["parentRefs"] == grpc["parentRefs"] == [{"name": "public", "namespace": "gateways"}]
    assert http["hostnames"] == ["llm.example.com"]
    assert http["rules"][0]["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    assert grpc["rules"][0]["backendRefs"] == [{"name": "demo-baton", "port": 50051}]


def test_settings_of_routers() -> None:
    router = case("outside").config("router")["router"]
    assert (router["max_waiting"], router["queue_timeout_s"]) == (4096, 30)
    assert router["connections"] == {"max_connections_per_address": 4096, "max_connection_age_s": 9}
    assert router["public_metrics"] is False


@pytest.mark.parametrize(("drain_s", "expected"), [(15, 9), (3, 1.8), (0, None)])
def test_grpc_connections_end_while_a_stopping_router_still_serves(
    drain_s: int, expected: float | None
) -> None:
    """One that was opened just before the Service knew of the stop ends before SIGTERM, jitter of 10 %
    included."""
    router = render_with("cpu", lifecycle__drainSeconds=drain_s).config("router")["router"]
    assert router.get("connections", {}).get("max_connection_age_s") == expected
    own = render_with("cpu", router__config={"connections": {"max_connection_age_s": 60}})
    assert own.config("router")["router"]["connections"]["max_connection_age_s"] == 60


def test_helm_test_makes_a_generation() -> None:
    rendered = case("tls-cert-manager")
    pod = rendered.one("Pod", "demo-baton-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["containers"][0]["command"] == [
        "baton",
        "check",
        "--http=https://demo-baton:443",
        "--grpc=demo-baton:50051",
        "--model=baton-demo",
        "--timeout-s=120",
        "--api-keys-file=/run/baton/secrets/api-keys",
        "--ca-file=/run/baton/tls/public/ca.crt",
    ]


def test_notes_have_commands_for_what_was_installed() -> None:
    notes = case("default").notes
    for command in (
        "kubectl -n llm rollout status deployment/demo-baton-router",
        "helm test demo -n llm",
        "kubectl -n llm port-forward service/demo-baton 8000:80 50051:50051",
        "curl -s http://127.0.0.1:8000/v1/completions",
        "grpcurl -plaintext",
        "loadgen run grpc://127.0.0.1:50051 --model baton-demo",
        "baton status",
    ):
        assert command in notes
    secure = case("tls-cert-manager").notes
    assert "https://127.0.0.1:8000" in secure
    assert "Authorization: Bearer $KEY" in secure
    assert "get secret api-keys" in secure
    assert "--cert" not in secure


def test_notes_have_what_clients_need() -> None:
    own = case("tls-own").notes
    assert "curl -sk --cert client.crt --key client.key https://" in own
    assert "grpcurl -insecure -cert client.crt -key client.key" in own
    assert "loadgen run grpcs://127.0.0.1:50051" in own
    assert "--ca-file ca.crt --server-name demo-baton --cert-file client.crt --key-file client.key\n" in own
    assert "--server-name llm.example.com\n" in case("production").notes
    keys = render_with("default", auth={"enabled": True, "existingSecret": "api-keys"}).notes
    assert "OPENAI_API_KEY=$KEY loadgen run grpc://" in keys


def test_notes_say_what_grpc_between_gpus_carries() -> None:
    assert "6.0 prompts" in " ".join(case("split").notes.split())
    assert "prompts of 1,024" not in " ".join(case("split-nccl-rdma").notes.split())
    assert "prompts of 1,024" not in " ".join(case("default").notes.split())
