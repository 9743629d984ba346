"""Secrets come by file: from existing Secrets, else generated once; and never by argument or variable."""

from __future__ import annotations

import re

import pytest
import yaml

from services.common.config.tracing import TracingSettings
from tests.deploy.chart import CASES, DUMPER, Object, Rendered, case, render, render_anew, render_with

KEYS = ("cluster-secret", "prefix-secret", "journal-key")


def _secret_files(spec: Object) -> dict[str, str]:
    """The Secret of each file under /run/baton/secrets."""
    volume = next(volume for volume in spec["volumes"] if volume["name"] == "secrets")
    return {
        item["path"]: source["secret"]["name"]
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }


def test_existing_secrets_are_used_and_none_is_made() -> None:
    rendered = case("production")
    assert rendered.of_kind("Secret") == {}
    assert _secret_files(rendered.pods()["demo-baton-router"]) == {
        **dict.fromkeys(KEYS, "baton-secrets"),
        "redis-url": "baton-redis",
        "api-keys": "baton-api-keys",
    }


def test_workers_have_no_key_of_the_journal_and_no_api_keys() -> None:
    rendered = case("production")
    files = _secret_files(rendered.pods()["demo-baton-workers"])
    assert set(files) == {"cluster-secret", "prefix-secret", "redis-url"}
    assert "journal_key_file" not in rendered.config("workers")["state"]
    assert "auth" not in rendered.config("workers")


def test_tenants_take_the_place_of_api_keys() -> None:
    """Routers read the file of tenants; the test has a key of its own, which that file does not hold."""
    rendered = case("kuberay-production")
    files = _secret_files(rendered.pods()["demo-baton-router"])
    assert files["tenants"] == "baton-tenants"
    assert "api-keys" not in files
    assert rendered.config("router")["auth"] == {"tenants_file": "/run/baton/secrets/tenants"}
    assert "tenants" not in _secret_files(rendered.pods()["demo-baton-prefill"])
    (keys,) = [one for one in rendered.pods()["demo-baton-test"]["volumes"] if one["name"] == "secrets"]
    assert keys["secret"]["secretName"] == "test-api-key"
    assert "get secret test-api-key" in rendered.notes
    without = render_with("kuberay-production", test={"enabled": False}).notes
    assert "KEY=…  # a key of a tenant" in without


def test_the_test_may_have_a_key_of_its_own_beside_api_keys() -> None:
    rendered = render_with("production", test__apiKeySecret="test-api-key")
    (keys,) = [one for one in rendered.pods()["demo-baton-test"]["volumes"] if one["name"] == "secrets"]
    assert keys["secret"]["secretName"] == "test-api-key"
    assert _secret_files(rendered.pods()["demo-baton-router"])["api-keys"] == "baton-api-keys"


def test_the_authority_of_redis_is_a_file_of_all_that_call_it() -> None:
    rendered = case("kuberay-production")
    for pod in ("router", "prefill", "decode", "supervisor", "ray-head"):
        assert _secret_files(rendered.pods()[f"demo-baton-{pod}"])["redis-ca.crt"] == "redis-ca"
    assert "redis-ca.crt" not in _secret_files(case("production").pods()["demo-baton-router"])


def test_headers_for_the_collector_of_traces_are_a_file_that_the_configuration_names() -> None:
    rendered = case("monitoring")
    for component in ("router", "workers"):
        files = _secret_files(rendered.pods()[f"demo-baton-{component}"])
        assert files["otlp-headers"] == "collector-headers"
        tracing = TracingSettings.model_validate(rendered.config(component)["tracing"])
        assert str(tracing.otlp_headers_file) == "/run/baton/secrets/otlp-headers"
        assert (tracing.traces_url, tracing.sample_ratio) == (
            "http://collector.observability:4318/v1/traces",
            0.01,
        )


def test_generated_secrets_differ_each_time_and_are_long() -> None:
    first, second = (render_anew({}).of_kind("Secret") for _ in range(2))
    data, other = first["demo-baton-secrets"]["stringData"], second["demo-baton-secrets"]["stringData"]
    assert set(data) == set(KEYS)
    assert all(data[key] != other[key] and len(data[key]) >= 48 for key in KEYS)
    assert re.fullmatch("[0-9a-f]{64}", data["journal-key"])
    redis = first["demo-baton-redis"]["stringData"]
    assert len(redis["redis-password"]) == 32
    assert redis["redis-url"] == f"redis://:{redis['redis-password']}@demo-baton-redis:6379/0"
    assert f"requirepass {redis['redis-password']}\n" in redis["valkey.conf"]


def test_generated_secrets_are_guarded_by_lookup() -> None:
    from tests.deploy.chart import CHART

    template = (CHART / "templates" / "security" / "secrets.yaml").read_text(encoding="utf-8")
    drawn = [line for line in template.splitlines() if "rand" in line]
    assert drawn
    assert all('include "baton.kept"' in line and '"old" $old' in line for line in drawn)
    assert template.count("lookup") == 2


def _checksums(rendered: Rendered) -> dict[str, str]:
    """The annotation that restarts pods, of the pods that have it."""
    noted = {
        pod: template["metadata"].get("annotations", {}) for pod, template in rendered.templates().items()
    }
    return {pod: notes["checksum/secrets"] for pod, notes in noted.items() if "checksum/secrets" in notes}


@pytest.mark.parametrize(
    ("key", "value", "restarted"),
    [
        ("clusterSecret", "another cluster secret", {"router", "workers", "supervisor"}),
        ("prefixSecret", "another prefix secret", {"router", "workers", "supervisor"}),
        ("journalKey", "0f" * 32, {"router"}),
        ("redisPassword", "anotherPasswordOfRedis", {"redis"}),
        ("rayToken", "another token of Ray", {"ray-head", "workers", "supervisor"}),
    ],
)
def test_a_new_value_restarts_the_pods_that_read_it_at_their_start(
    key: str, value: str, restarted: set[str]
) -> None:
    before = _checksums(case("ray"))
    after = _checksums(render_with("ray", **{f"secrets__values__{key}": value}))
    assert {pod for pod in after if after[pod] != before[pod]} == {f"demo-baton-{pod}" for pod in restarted}


def test_secrets_that_helm_does_not_change_restart_nothing() -> None:
    """Generated ones are generated once; a Secret of one's own changes without Helm."""
    assert _checksums(render({})) == {}
    assert _checksums(case("production")) == {}


def test_notes_warn_of_generated_secrets_only() -> None:
    assert "secrets were generated" in render({}).notes
    assert "secrets were generated" not in case("production").notes


@pytest.mark.parametrize("name", CASES)
def test_no_secret_is_in_an_argument_variable_or_configuration(name: str) -> None:
    rendered = case(name)
    secrets = {
        value
        for secret in rendered.of_kind("Secret").values()
        for key, value in secret["stringData"].items()
        if key not in ("valkey.conf", "redis-url")
    }
    elsewhere = [made for made in rendered.objects if made["kind"] != "Secret"]
    text = yaml.dump(elsewhere, Dumper=DUMPER)
    assert not [secret for secret in secrets if secret in text]
    for spec in rendered.pods().values():
        for container in spec["containers"]:
            for variable in container.get("env", ()):
                assert "secretKeyRef" not in variable.get("valueFrom", {})


@pytest.mark.parametrize("name", CASES)
def test_secret_files_that_configurations_name_are_mounted(name: str) -> None:
    rendered = case(name)
    maps = rendered.of_kind("ConfigMap")
    for spec in rendered.pods().values():
        container = spec["containers"][0]
        config = next((volume for volume in spec["volumes"] if volume["name"] == "config"), None)
        if config is None or container.get("command", [""])[0] != "baton":
            continue
        (text,) = maps[config["configMap"]["name"]]["data"].values()
        mounted = _files(spec)
        named = set(re.findall(r"/run/baton/(?:secrets|tls)/\S+", text))
        assert named or container["name"] == "test"
        assert named <= mounted | {"/run/baton/tls/public/ca.crt"}, named - mounted


def _files(spec: Object) -> set[str]:
    """Files of projected and certificate volumes in the main container."""
    places = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    found = set()
    for volume in spec["volumes"]:
        items = [item["path"] for item in volume.get("secret", {}).get("items", ())]
        for source in volume.get("projected", {}).get("sources", ()):
            items += [item["path"] for item in source["secret"]["items"]]
        if volume["name"] in ("internal-tls", "public-tls") and not items:
            items = ["tls.crt", "tls.key", "ca.crt"]
        if volume["name"] in places:
            found |= {f"{places[volume['name']]}/{item}" for item in items}
    return found


def test_external_redis_without_a_password_is_in_the_configuration() -> None:
    rendered = render_with("default", redis={"url": "redis://redis.data:6379/0"})
    assert rendered.config("router")["state"]["redis_url"] == "redis://redis.data:6379/0"
    assert "redis_url_file" not in rendered.config("router")["state"]
    assert "demo-baton-redis" not in rendered.of_kind("Deployment")


def test_bundled_valkey_has_its_password_in_a_file() -> None:
    rendered = case("default")
    assert rendered.container("demo-baton-redis")["command"] == [
        "valkey-server",
        "/run/baton/redis/valkey.conf",
    ]
    assert rendered.one("Service", "demo-baton-redis")["spec"]["ports"][0]["port"] == 6379
    assert "bundled Valkey" in rendered.notes
