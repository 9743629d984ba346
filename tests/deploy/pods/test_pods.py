"""Properties of every pod of every case: security, probes, a way to stop, images, no token."""

from __future__ import annotations

import pytest

from tests.deploy.chart import (
    CASES,
    CHART,
    VERSION,
    Object,
    at,
    case,
    load_yaml,
    render,
    render_with,
    values_of,
)

# Their containers are the user's own, or a model's image.
FOREIGN = {"before", "beside"}


def _own(spec: Object, kind: str = "containers") -> list[Object]:
    return [container for container in spec.get(kind, ()) if container["name"] not in FOREIGN]


@pytest.mark.parametrize("name", CASES)
def test_no_pod_may_do_more_than_the_restricted_level_allows(name: str) -> None:
    for pod, spec in case(name).pods().items():
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True, pod
        assert security["runAsUser"] >= 10000, pod
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, pod
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), pod
        for container in _own(spec) + _own(spec, "initContainers"):
            of_container = container["securityContext"]
            assert of_container["allowPrivilegeEscalation"] is False, pod
            assert of_container["readOnlyRootFilesystem"] is True, pod
            assert of_container["capabilities"]["drop"] == ["ALL"], pod
            added = of_container["capabilities"].get("add", [])
            assert added == (
                ["IPC_LOCK"] if name == "split-nccl-rdma" and "router" not in pod else []
            ) or pod in (
                "demo-baton-redis",
                "demo-baton-test",
            )


@pytest.mark.parametrize("name", CASES)
def test_no_pod_mounts_a_token_or_gets_variables_of_services(name: str) -> None:
    for spec in case(name).pods().values():
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["serviceAccountName"]
    for account in case(name).of_kind("ServiceAccount").values():
        assert account["automountServiceAccountToken"] is False
    kinds = {made["kind"] for made in case(name).objects}
    assert not kinds & {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}


@pytest.mark.parametrize("name", CASES)
def test_every_container_has_writable_tmp_and_mounts_only_volumes_that_are_there(name: str) -> None:
    for spec in case(name).pods().values():
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert len(volumes) == len(spec["volumes"])
        for container in spec["containers"] + spec.get("initContainers", []):
            mounts = container.get("volumeMounts", [])
            assert {mount["name"] for mount in mounts} <= volumes
            paths = [mount["mountPath"] for mount in mounts]
            assert len(set(paths)) == len(paths)
        for container in _own(spec):
            assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]


@pytest.mark.parametrize("name", CASES)
def test_every_container_declares_what_it_needs(name: str) -> None:
    for spec in case(name).pods().values():
        for container in _own(spec) + _own(spec, "initContainers"):
            assert set(container["resources"]["requests"]) >= {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("name", CASES)
def test_configmaps_that_pods_mount_are_there_and_restart_them(name: str) -> None:
    maps = case(name).of_kind("ConfigMap")
    for pod, template in case(name).templates().items():
        config = [volume for volume in template["spec"]["volumes"] if volume["name"] == "config"]
        for volume in config:
            assert volume["configMap"]["name"] in maps
            if not pod.endswith("-test"):
                assert "checksum/config" in template["metadata"]["annotations"]


@pytest.mark.parametrize("name", CASES)
def test_every_object_has_the_labels_and_namespace_of_the_release(name: str) -> None:
    for made in case(name).objects:
        if made["metadata"]["name"] in ("extra", "demo-text"):
            continue
        labels = made["metadata"]["labels"]
        assert made["metadata"]["namespace"] == "llm"
        assert labels["app.kubernetes.io/name"] == values_of(name).get("nameOverride", "baton")
        assert labels["app.kubernetes.io/instance"] == "demo"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["app.kubernetes.io/component"]
        assert labels["app.kubernetes.io/part-of"]


@pytest.mark.parametrize("name", CASES)
def test_selectors_select_the_pods_of_their_workload_alone(name: str) -> None:
    pods = {pod: template["metadata"]["labels"] for pod, template in case(name).templates().items()}
    for deployment, made in case(name).of_kind("Deployment").items():
        wanted = made["spec"]["selector"]["matchLabels"].items()
        assert [pod for pod, labels in pods.items() if wanted <= labels.items()] == [deployment]
    for service in case(name).of_kind("Service").values():
        wanted = service["spec"]["selector"].items()
        assert any(wanted <= labels.items() for labels in pods.values()), service["metadata"]["name"]


@pytest.mark.parametrize("name", CASES)
def test_ports_of_services_and_probes_are_those_of_containers(name: str) -> None:
    named = {}
    for pod, template in case(name).templates().items():
        ports = {
            port["name"]: port["containerPort"] for port in template["spec"]["containers"][0].get("ports", ())
        }
        assert len(set(ports.values())) == len(ports)
        assert all(len(port) <= 15 for port in ports)
        named[pod] = (template["metadata"]["labels"], ports)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = template["spec"]["containers"][0].get(probe, {})
            for how in ("httpGet", "tcpSocket"):
                assert asked.get(how, {}).get("port") in {*ports, None}
    for service in case(name).of_kind("Service").values():
        for labels, ports in named.values():
            if service["spec"]["selector"].items() <= labels.items():
                assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports)


@pytest.mark.parametrize("name", CASES)
def test_probes_ask_the_plain_http_port(name: str) -> None:
    for pod, spec in case(name).pods().items():
        container = spec["containers"][0]
        if container.get("command", [""])[0] != "baton" or pod.endswith("-test"):
            continue
        assert container["startupProbe"]["httpGet"] == {"path": "/health", "port": "admin"}
        assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": "admin"}
        assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "admin"}


@pytest.mark.parametrize("component", ["workers", "router"])
def test_startup_probe_of_workers_follows_the_load_timeout(component: str) -> None:
    rendered = render_with("default", modelLoadTimeout=1801)
    probe = rendered.container(f"demo-baton-{component}")["startupProbe"]
    allowed = probe["periodSeconds"] * probe["failureThreshold"]
    if component == "workers":
        assert 1801 <= allowed < 1801 + 5
        assert rendered.config("workers")["start_timeout_s"] == 1801
    else:
        assert allowed == 120


def test_grace_is_drain_and_longest_generation() -> None:
    rendered = render_with(
        "default", lifecycle={"drainSeconds": 20, "longestGenerationSeconds": 300, "marginSeconds": 7}
    )
    router, workers = rendered.pods()["demo-baton-router"], rendered.pods()["demo-baton-workers"]
    assert router["terminationGracePeriodSeconds"] == 20 + 300 + 7
    assert router["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "20"]
    assert workers["terminationGracePeriodSeconds"] == 300 + 7
    assert rendered.config("router")["drain_s"] == 300
    assert rendered.config("router")["router"]["request_timeout_s"] == 300
    assert rendered.config("workers")["drain_s"] == 300
    assert "within 327 s" in rendered.notes


@pytest.mark.parametrize("name", CASES)
def test_no_pod_is_killed_before_its_requests_may_have_ended(name: str) -> None:
    longest = values_of(name).get("lifecycle", {}).get("longestGenerationSeconds", 600)
    for pod, spec in case(name).pods().items():
        command = spec["containers"][0].get("command", [""])[0]
        if command == "baton" and not pod.endswith("-test"):
            assert spec["terminationGracePeriodSeconds"] > longest


def test_images_have_registry_tag_and_digest() -> None:
    rendered = case("model-pvc")
    digest = at(values_of("model-pvc"), "image.router.digest")
    assert (
        rendered.container("chat-router")["image"]
        == f"registry.example.com:5000/llm/baton-router:1.2@{digest}"
    )
    worker = rendered.container("chat-workers")["image"]
    assert worker == f"registry.example.com:5000/llm/baton-worker:{VERSION}"
    assert rendered.pods()["chat-workers"]["imagePullSecrets"] == [{"name": "registry"}]
    assert (
        render_with("default", image__registry="").container("demo-baton-router")["image"]
        == f"baton-router:{VERSION}"
    )


def test_service_account_of_ones_own() -> None:
    assert case("placement").of_kind("ServiceAccount") == {}
    assert {spec["serviceAccountName"] for spec in case("placement").pods().values()} == {"own-account"}


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("values-cpu", "restricted"),
        ("values-h100-8b", "privileged"),
        ("values-h200-70b", "privileged"),
        ("values-h200-70b-bf16", "privileged"),
    ],
)
def test_the_level_of_pod_security_that_values_for_hardware_need(name: str, level: str) -> None:
    """README and docs/kubernetes.md say it: `baseline` forbids folders of the node, and IPC_LOCK."""
    rendered = render(load_yaml((CHART / f"{name}.yaml").read_text(encoding="utf-8")))
    pods = rendered.pods().values()
    folders = [volume for spec in pods for volume in spec["volumes"] if "hostPath" in volume]
    added = [
        capability
        for spec in pods
        for capability in spec["containers"][0]["securityContext"]["capabilities"].get("add", ())
    ]
    assert bool(folders or added) == (level == "privileged")
    assert set(added) <= {"IPC_LOCK"}
