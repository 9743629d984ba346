"""Certificates: of cert-manager, of one's own, or one a pod."""

from __future__ import annotations

from tests.deploy.chart import Object, case, render_with

INTERNAL = "/run/baton/tls/internal"


def _volume(spec: Object, name: str) -> Object:
    return next(volume for volume in spec["volumes"] if volume["name"] == name)


def test_every_role_has_a_certificate_of_its_own() -> None:
    rendered = case("tls-cert-manager")
    certificates = rendered.of_kind("Certificate")
    for role in ("router", "prefill", "decode", "redis"):
        spec = certificates[f"demo-baton-{role}-internal"]["spec"]
        assert spec["dnsNames"][0] == f"{role}.demo-baton.baton.internal"
        assert f"demo-baton-{role}.llm.svc.cluster.local" in spec["dnsNames"]
        assert set(spec["usages"]) == {"digital signature", "server auth", "client auth"}
        assert spec["issuerRef"] == {"name": "demo-baton-internal", "kind": "Issuer"}
        volume = _volume(rendered.pods()[f"demo-baton-{role}"], "internal-tls")
        assert volume["secret"]["secretName"] == spec["secretName"]


def test_without_an_issuer_the_chart_makes_an_authority() -> None:
    rendered = case("tls-cert-manager")
    issuers = rendered.of_kind("Issuer")
    assert issuers["demo-baton-self-signed"]["spec"] == {"selfSigned": {}}
    authority = rendered.one("Certificate", "demo-baton-authority")["spec"]
    assert authority["isCA"] is True
    assert issuers["demo-baton-internal"]["spec"] == {"ca": {"secretName": authority["secretName"]}}
    named = render_with(
        "tls-cert-manager", tls__internal__issuerRef={"name": "corp", "kind": "ClusterIssuer"}
    )
    assert named.of_kind("Issuer") == {}
    issuer = named.one("Certificate", "demo-baton-decode-internal")["spec"]["issuerRef"]
    assert issuer == {"name": "corp", "kind": "ClusterIssuer"}


def test_public_certificate_has_the_services_names() -> None:
    rendered = case("tls-cert-manager")
    names = rendered.one("Certificate", "demo-baton-public")["spec"]["dnsNames"]
    assert {
        "demo-baton",
        "demo-baton.llm.svc",
        "demo-baton-headless.llm.svc.cluster.local",
        "llm.example.com",
    } <= {*names}


def test_public_certificate_of_an_authority_outside_has_no_names_of_services() -> None:
    rendered = case("production")
    assert rendered.one("Certificate", "demo-baton-public")["spec"]["dnsNames"] == ["llm.example.com"]
    (test,) = rendered.pods()["demo-baton-test"]["containers"]
    assert "--server-name=llm.example.com" in test["command"]


def test_configurations_name_the_files() -> None:
    rendered = case("tls-own")
    router = rendered.config("router")["tls"]
    assert router["internal"] == {
        "cert_file": f"{INTERNAL}/tls.crt",
        "key_file": f"{INTERNAL}/tls.key",
        "ca_file": f"{INTERNAL}/ca.crt",
        "domain": "demo-baton.baton.internal",
    }
    assert router["public"]["client_ca_file"] == "/run/baton/tls/public/client-ca.crt"
    assert "public" not in rendered.config("workers")["tls"]


def test_clients_authority_and_the_tests_own_certificate() -> None:
    rendered = case("tls-own")
    sources = _volume(rendered.pods()["demo-baton-router"], "public-tls")["projected"]["sources"]
    assert {source["secret"]["name"] for source in sources} == {"public-tls", "client-ca"}
    assert _volume(rendered.pods()["demo-baton-test"], "public-tls")["secret"]["secretName"] == "test-client"
    (test,) = rendered.pods()["demo-baton-test"]["containers"]
    assert "--cert-file=/run/baton/tls/public/tls.crt" in test["command"]


def test_the_test_never_gets_the_routers_key() -> None:
    volume = _volume(case("tls-cert-manager").pods()["demo-baton-test"], "public-tls")["secret"]
    assert volume["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert volume["optional"] is True


def test_certificates_are_not_mounted_by_sub_path_so_that_they_are_renewed_in_place() -> None:
    for name in ("tls-own", "tls-cert-manager", "tls-csi"):
        for spec in case(name).pods().values():
            for container in spec["containers"]:
                assert not [mount for mount in container["volumeMounts"] if "subPath" in mount]


def test_csi_driver_gives_each_pod_a_certificate_with_its_name() -> None:
    rendered = case("tls-csi")
    assert rendered.of_kind("Certificate") == {}
    csi = _volume(rendered.pods()["demo-baton-workers"], "internal-tls")["csi"]
    names = csi["volumeAttributes"]["csi.cert-manager.io/dns-names"].split(",")
    assert names[:2] == ["${POD_NAME}.${POD_NAMESPACE}.baton.internal", "workers.demo-baton.baton.internal"]
    assert csi["volumeAttributes"]["csi.cert-manager.io/issuer-kind"] == "ClusterIssuer"


def test_bundled_valkey_speaks_tls_alone() -> None:
    secret = case("tls-cert-manager").one("Secret", "demo-baton-redis")["stringData"]
    assert secret["redis-url"].startswith("rediss://")
    assert f"ssl_ca_certs={INTERNAL}/ca.crt" in secret["redis-url"]
    assert "\nport 0\n" in secret["valkey.conf"]
    assert "tls-auth-clients yes" in secret["valkey.conf"]


def test_ray_speaks_tls_and_asks_for_a_token() -> None:
    for pod in ("demo-baton-ray-head", "demo-baton-workers", "demo-baton-supervisor"):
        env = {one["name"]: one.get("value") for one in case("ray").container(pod)["env"]}
        assert env["RAY_AUTH_MODE"] == "token"
        assert env["RAY_AUTH_TOKEN_PATH"] == "/run/baton/secrets/ray-token"
        assert env["RAY_USE_TLS"] == "1"


def test_plaintext_is_mentioned_in_the_notes_and_refused_by_the_processes_where_strict() -> None:
    assert "is not encrypted" in case("default").notes
    assert "is not encrypted" not in case("production").notes
    assert case("production").config("router")["require_tls"] is True
    assert case("production").config("workers")["require_tls"] is True
    assert case("default").config("router")["require_tls"] is False
