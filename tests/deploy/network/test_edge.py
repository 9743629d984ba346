"""The edge before routers: ports, Ingress controllers and gateways, with TLS and without."""

from __future__ import annotations

from typing import Any

import pytest
from helm_python import HelmError

from tests.deploy.chart import Rendered, Values, case, put, render_with, values_of
from tests.deploy.kubernetes_schemas import NEWEST, errors_in

NGINX = "nginx.ingress.kubernetes.io/"


def _strict(**changes: Any) -> Rendered:
    return render_with("production", **changes)


def _annotations(rendered: Rendered, name: str) -> dict[str, str]:
    found: dict[str, str] = rendered.one("Ingress", name)["metadata"]["annotations"]
    return {key.removeprefix(NGINX): value for key, value in found.items() if key.startswith(NGINX)}


@pytest.mark.parametrize(("tls", "given", "port"), [(False, 0, 80), (True, 0, 443), (True, 8443, 8443)])
def test_https_is_at_its_own_port(tls: bool, given: int, port: int) -> None:
    rendered = render_with("tls-own" if tls else "default", router__service={"httpPort": given})
    assert rendered.one("Service")["spec"]["ports"][0]["port"] == port
    scheme = "https" if tls else "http"
    assert f"{scheme}://demo-baton.llm:{port}/v1" in rendered.notes
    (container,) = rendered.pods()["demo-baton-test"]["containers"]
    assert f"--http={scheme}://demo-baton:{port}" in container["command"]


def test_nginx_passes_streams_on_waits_as_long_as_routers_do_and_leaves_bodies_to_them() -> None:
    rendered = render_with("outside", lifecycle={"longestGenerationSeconds": 900})
    for name in ("demo-baton", "demo-baton-grpc"):
        annotations = _annotations(rendered, name)
        assert int(annotations["proxy-read-timeout"]) > 900
        assert int(annotations["proxy-send-timeout"]) > 900
        assert annotations["proxy-buffering"] == annotations["proxy-request-buffering"] == "off"
        assert annotations["proxy-body-size"] == "0"
        assert "proxy-ssl-name" not in annotations
    assert _annotations(rendered, "demo-baton-grpc")["backend-protocol"] == "GRPC"
    assert "backend-protocol" not in _annotations(rendered, "demo-baton")


def test_nginx_speaks_tls_to_routers_that_want_it() -> None:
    ingress = {
        "enabled": True,
        "className": "nginx-public",
        "hosts": ["llm.example.com"],
        "annotations": {f"{NGINX}proxy-body-size": "8m"},
        "grpc": {"enabled": True, "hosts": ["grpc.example.com"]},
    }
    rendered = _strict(ingress=ingress)
    http, grpc = (_annotations(rendered, name) for name in ("demo-baton", "demo-baton-grpc"))
    assert (http["backend-protocol"], grpc["backend-protocol"]) == ("HTTPS", "GRPCS")
    assert http["proxy-ssl-name"] == "llm.example.com"
    # The user's own goes first.
    assert (http["proxy-body-size"], grpc["proxy-body-size"]) == ("8m", "0")
    backend = rendered.one("Ingress")["spec"]["rules"][0]["http"]["paths"][0]["backend"]
    assert backend["service"]["port"]["number"] == 443


def test_other_controllers_get_the_users_annotations_alone() -> None:
    rendered = render_with("outside", ingress__className="traefik")
    assert "annotations" not in rendered.one("Ingress")["metadata"]


def test_a_gateway_speaks_tls_to_routers_that_want_it() -> None:
    gateway = {
        "parentRefs": [{"name": "public"}],
        "httpRoute": {"enabled": True},
        "grpcRoute": {"enabled": True},
        "backendTLSPolicy": {"enabled": True, "caConfigMap": "llm-ca"},
    }
    rendered = _strict(gateway=gateway)
    spec = rendered.one("BackendTLSPolicy")["spec"]
    assert spec["targetRefs"] == [{"group": "", "kind": "Service", "name": "demo-baton"}]
    assert spec["validation"] == {
        "hostname": "llm.example.com",
        "caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "llm-ca"}],
    }
    assert rendered.one("HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]["port"] == 443
    gateway["backendTLSPolicy"] = {"enabled": True}
    own = _strict(gateway=gateway, tls__public__serviceNames=True).one("BackendTLSPolicy")["spec"][
        "validation"
    ]
    assert own == {"hostname": "demo-baton.llm.svc", "wellKnownCACertificates": "System"}


@pytest.mark.parametrize(("chosen", "made"), [("auto", 0), ("always", 1), ("never", 0)])
def test_envoy_gateway_does_not_end_grpc_calls_after_15_s(chosen: str, made: int) -> None:
    """`auto`: where the API server has its kinds, which no rendering without one knows (`test_helm_3`)."""
    policies = render_with("outside", gateway__envoyGateway=chosen).of_kind("BackendTrafficPolicy")
    assert len(policies) == made
    for policy in policies.values():
        assert errors_in(policy, NEWEST) == []
        (target,) = policy["spec"]["targetRefs"]
        assert (target["kind"], target["name"]) == ("GRPCRoute", "demo-baton")
        assert policy["spec"]["timeout"]["http"] == {"requestTimeout": "0s"}


def test_http_routes_have_no_limit_of_time() -> None:
    """Time limits of requests, and so in Envoy Gateway of idle streams; Istio has none of either."""
    (rule,) = case("outside").one("HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("outside", {"ingress.grpc.hosts": ["llm.example.com"]}, "gRPC needs a host of its own"),
        (
            "production",
            {"gateway": {"parentRefs": [{"name": "g"}], "grpcRoute": {"enabled": True}}},
            "gateway.backendTLSPolicy.enabled is false",
        ),
        ("default", {"gateway.backendTLSPolicy.enabled": True}, "is for a route and tls.public.enabled"),
        ("production", {"model.hub.revision": "main"}, "model.hub.revision main moves"),
        ("second-pool", {"secrets.draw": False, "secrets.existingSecret": ""}, "secrets.draw is false"),
    ],
)
def test_what_would_not_work_is_refused(name: str, changes: Values, message: str) -> None:
    with pytest.raises(HelmError, match=message):
        render_with(name, **{path.replace(".", "__"): value for path, value in changes.items()})


@pytest.mark.parametrize("name", ["tls-cert-manager", "tls-csi", "production"])
def test_issuers_of_any_kind_and_group(name: str) -> None:
    issuer = {"name": "corp", "kind": "AWSPCAClusterIssuer", "group": "awspca.cert-manager.io"}
    values = values_of(name)
    for which in ("public", "internal"):
        if values.get("tls", {}).get(which, {}).get("certManager"):
            put(values, f"tls.{which}.issuerRef", issuer)
    rendered = render_with(name, tls=values["tls"])
    certificates = rendered.of_kind("Certificate").values()
    assert all(one["spec"]["issuerRef"] == issuer for one in certificates)
    if name == "tls-csi":
        volumes = rendered.pods()["demo-baton-workers"]["volumes"]
        (csi,) = [one["csi"]["volumeAttributes"] for one in volumes if "csi" in one]
        assert csi["csi.cert-manager.io/issuer-group"] == issuer["group"]
        assert csi["csi.cert-manager.io/issuer-kind"] == issuer["kind"]
    assert case(name).objects
