"""Ray's pods, as Deployments or as a RayCluster of KubeRay's operator."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.deploy.chart import case, render, render_with

# Pods that the chart and KubeRay make of the same values; their contents must not differ.
PODS = ("ray-head", "workers")


def test_ray_is_off_by_default() -> None:
    names = set(render({}).of_kind("Deployment"))
    assert names == {"demo-baton-router", "demo-baton-workers", "demo-baton-redis"}


def test_one_install_needs_no_operator() -> None:
    rendered = case("ray")
    assert set(rendered.of_kind("Deployment")) == {
        f"demo-baton-{name}" for name in ("router", "ray-head", "workers", "supervisor", "redis")
    }
    head, worker = rendered.container("demo-baton-ray-head"), rendered.container("demo-baton-workers")
    assert head["command"][:3] == ["ray", "start", "--block"]
    assert "--head" in head["command"]
    assert "--num-cpus=0" in head["command"]
    assert "--address=demo-baton-ray-head:6379" in worker["command"]
    assert "--num-gpus=3" in worker["command"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "3"


@pytest.mark.parametrize("name", ["ray", "kuberay"])
def test_ray_nodes_drain_their_workers_before_ray_ends_them(name: str) -> None:
    for pod, spec in case(name).pods().items():
        stop = spec["containers"][0].get("lifecycle")
        if pod.rpartition("-")[2] in ("workers", "prefill", "decode"):
            assert stop["preStop"]["exec"]["command"] == ["baton", "ray", "stop-workers", "--within", "600"]
            assert spec["terminationGracePeriodSeconds"] > 600


def test_ray_nodes_declare_room_for_the_workers_of_their_role() -> None:
    command = case("ray").container("demo-baton-workers")["command"]
    (room,) = [flag for flag in command if flag.startswith("--resources=")]
    assert json.loads(room.partition("=")[2]) == {"baton-prefill": 1, "baton-decode": 2}
    assert not any(
        flag.startswith("--resources=") for flag in case("ray").container("demo-baton-ray-head")["command"]
    )
    groups = case("kuberay").one("RayCluster")["spec"]["workerGroupSpecs"]
    # KubeRay writes it into a shell command as it stands.
    words = {group["groupName"]: shlex.split(group["rayStartParams"]["resources"]) for group in groups}
    assert {name: [json.loads(word) for word in words] for name, words in words.items()} == {
        "prefill": [{"baton-prefill": 1}],
        "decode": [{"baton-decode": 1}],
    }


def test_the_supervisor_has_what_a_ray_node_of_its_own_needs() -> None:
    pod = case("ray").pods()["demo-baton-supervisor"]
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {"/dev/shm", "/tmp"} <= mounts
    env = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert env["RAY_AUTH_TOKEN_PATH"] == "/run/baton/secrets/ray-token"
    assert env["RAY_USE_TLS"] == "1"
    surviving = case("kuberay").container("demo-baton-supervisor")["env"]
    assert {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "600"} in surviving


def test_supervisor_knows_how_many_workers_to_start() -> None:
    rendered = case("ray")
    assert rendered.container("demo-baton-supervisor")["command"] == [
        *("baton", "ray", "supervise", "--config", "/etc/baton/supervisor.yaml")
    ]
    config = rendered.config("supervisor")
    assert (config["prefill"], config["decode"]) == (2, 4)
    assert config["supervision"] == {"ray_address": "demo-baton-ray-head:6379"}
    split = case("kuberay").config("supervisor")
    assert (split["prefill"], split["decode"]) == (2, 2)
    assert split["supervision"] == {"ray_address": "demo-baton-head-svc:6379"}


@pytest.mark.parametrize("pod", PODS)
def test_kuberay_gets_the_same_pods(pod: str) -> None:
    plain = render_with("ray", tls={}).templates()[f"demo-baton-{pod}"]
    operated = render_with("ray", tls={}, ray={"enabled": False}, kuberay={"enabled": True})
    template = operated.templates()[f"demo-baton-{pod}"]
    assert "command" not in template["spec"]["containers"][0]
    del plain["spec"]["containers"][0]["command"]
    for one in (plain, template):
        one["metadata"].pop("annotations", None)  # the address of the head differs
    assert plain == template


def test_raycluster_has_fault_tolerance() -> None:
    cluster = case("kuberay").one("RayCluster")
    options = cluster["spec"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis://demo-baton-redis:6379"
    reference = options["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": "demo-baton-redis", "key": "redis-password"}
    assert "redis-password" in case("kuberay").one("Secret", "demo-baton-redis")["stringData"]
    assert "redisUsername" not in options
    without = render_with("kuberay", kuberay__gcsFaultTolerance={"enabled": False})
    assert "gcsFaultToleranceOptions" not in without.one("RayCluster")["spec"]


@pytest.mark.parametrize(
    ("address", "given"),
    [
        ("redis.data:6380", "redis://redis.data:6380"),
        ("redis://redis.data:6380", "redis://redis.data:6380"),
        ("rediss://redis.data:6380", "rediss://redis.data:6380"),
    ],
)
def test_a_redis_of_ones_own_for_the_control_store(address: str, given: str) -> None:
    fault = {"redisAddress": address, "existingSecret": "r", "username": "ray"}
    cluster = render_with("kuberay", kuberay__gcsFaultTolerance=fault).one("RayCluster")
    options = cluster["spec"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == given
    assert options["redisUsername"] == {"value": "ray"}
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == "r"


def test_raycluster_has_a_group_for_each_role() -> None:
    spec = case("kuberay").one("RayCluster")["spec"]
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert [(group["groupName"], group["replicas"]) for group in spec["workerGroupSpecs"]] == [
        ("prefill", 2),
        ("decode", 2),
    ]
    assert set(case("kuberay").of_kind("Deployment")) == {
        f"demo-baton-{name}" for name in ("router", "supervisor", "redis")
    }


def test_no_secret_is_in_what_ray_is_given() -> None:
    config = case("ray").config("supervisor")
    assert config["cluster_secret_file"] == "/run/baton/secrets/cluster-secret"
    files = case("ray").pods()["demo-baton-workers"]["volumes"]
    (secrets,) = [volume for volume in files if volume["name"] == "secrets"]
    keys = {item["key"] for source in secrets["projected"]["sources"] for item in source["secret"]["items"]}
    assert keys == {"cluster-secret", "prefix-secret", "ray-token", "redis-url"}


@pytest.mark.parametrize("pod", ["ray-head", "workers", "supervisor"])
def test_a_pod_of_ray_makes_a_certificate_for_its_address(pod: str) -> None:
    """The authority's key is in the init container alone, and the authority is Ray's alone."""
    spec = case("ray").pods()[f"demo-baton-{pod}"]
    init = spec["initContainers"][0]
    assert init["command"][:3] == ["baton", "ray", "certificate"]
    assert "$(BATON_HOST)" in init["command"]
    assert ("demo-baton-ray-head" in init["command"]) == (pod == "ray-head")
    mounts = {one["name"]: one for one in init["volumeMounts"]}
    assert mounts["ray-authority"]["readOnly"] is True
    main = {one["name"]: one for one in spec["containers"][0]["volumeMounts"]}
    assert "ray-authority" not in main
    assert main["ray-tls"]["readOnly"] is True
    made = case("ray").one("Certificate", "demo-baton-ray-authority")["spec"]
    assert made["isCA"] is True
    (authority,) = [one for one in spec["volumes"] if one["name"] == "ray-authority"]
    assert authority["secret"]["secretName"] == made["secretName"]


def test_an_authority_of_ones_own_for_ray() -> None:
    internal = {"enabled": True, "existingSecret": "internal-tls", "rayAuthoritySecret": "ray-ca"}
    rendered = render_with("ray", tls__internal=internal)
    assert rendered.of_kind("Certificate") == {}
    for pod in ("ray-head", "workers", "supervisor"):
        volumes = {one["name"]: one for one in rendered.pods()[f"demo-baton-{pod}"]["volumes"]}
        assert volumes["ray-authority"]["secret"]["secretName"] == "ray-ca"
        assert volumes["internal-tls"]["secret"]["secretName"] == "internal-tls"


def test_without_tls_ray_has_no_certificates() -> None:
    for spec in render_with("ray", tls={}).pods().values():
        assert "initContainers" not in spec
