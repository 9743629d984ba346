"""Prefill and decode, a pod each or together, and settings of a role."""

from __future__ import annotations

import pytest

from tests.deploy.chart import case, render, render_with


def test_a_group_is_one_container_with_all_gpus() -> None:
    rendered = case("scaling-node")
    container = rendered.container("demo-baton-workers")
    assert container["command"] == [
        *("baton", "worker", "group", "--prefill", "1", "--decode", "3"),
        *("--config", "/etc/baton/workers.yaml"),
    ]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert container["resources"]["requests"]["nvidia.com/gpu"] == "4"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [ports[f"grpc-{index}"] for index in range(4)] == [50060, 50061, 50062, 50063]
    assert [ports[f"metrics-{index}"] for index in range(4)] == [9400, 9401, 9402, 9403]
    assert "demo-baton-prefill" not in rendered.of_kind("Deployment")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_split_is_a_pod_a_worker(role: str) -> None:
    rendered = case("split")
    container = rendered.container(f"demo-baton-{role}")
    assert container["command"] == ["baton", "worker", "--role", role, "--config", f"/etc/baton/{role}.yaml"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert (
        rendered.one("Deployment", f"demo-baton-{role}")["spec"]["replicas"]
        == {"prefill": 2, "decode": 3}[role]
    )
    assert "demo-baton-workers" not in rendered.of_kind("Deployment")


def test_a_pod_has_the_gpus_of_its_workers() -> None:
    """Unless a number is set, whether they are one GPU each or divide a model among several."""
    group = {"workerGroup": {"prefill": 1, "decode": 3}}
    for values, devices in ((group, 4), ({**group, "engine": {"tensor_parallel": 2}}, 8)):
        limits = render(values).container("demo-baton-workers")["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == str(devices)
    split = render({"topology": "split", "decode": {"engine": {"tensor_parallel": 4}}})
    for role, devices in (("prefill", 1), ("decode", 4)):
        limits = split.container(f"demo-baton-{role}")["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == str(devices)
    on_cpus = render({"engine": {"device": "cpu"}}).container("demo-baton-workers")
    assert "nvidia.com/gpu" not in on_cpus["resources"]["limits"]
    on_ray = render({"ray": {"enabled": True}, "engine": {"tensor_parallel": 2}})
    assert "--num-gpus=4" in on_ray.container("demo-baton-workers")["command"]


def test_a_70b_in_16_bits_has_two_gpus_a_pod() -> None:
    import yaml

    from tests.deploy.chart import CHART

    values = yaml.safe_load((CHART / "values-h200-70b-bf16.yaml").read_text(encoding="utf-8"))
    rendered = render(values)
    for role in ("prefill", "decode"):
        limits = rendered.container(f"demo-baton-{role}")["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == str(values["engine"]["tensor_parallel"]) == "2"


def test_both_roles_know_the_same_keys() -> None:
    import yaml

    from tests.deploy.chart import CHART

    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    prefill, decode = values["prefill"], values["decode"]
    assert prefill.keys() == decode.keys()
    for key in prefill:
        if key != "autoscaling" and isinstance(prefill[key], dict):
            assert prefill[key].keys() == decode[key].keys()


def test_engine_settings_of_a_role_go_before_the_common_ones() -> None:
    rendered = case("split-nccl-rdma")
    prefill, decode = rendered.config("prefill")["engine"], rendered.config("decode")["engine"]
    assert prefill == {
        "dtype": "bf16",
        "gpu_memory": 0.9,
        "max_context_tokens": 1048576,
        "chunk_tokens": 4096,
        "kernel_cache": "/var/cache/baton/kernels",
    }
    assert decode["slots"] == 128
    assert rendered.config("decode")["transfer"] == {
        "transport": "nccl",
        "transfer_port": 50100,
        "frames_port": 50140,
    }


def test_nccl_and_rdma() -> None:
    rendered = case("split-nccl-rdma")
    container = rendered.container("demo-baton-prefill")
    assert {"name": "NCCL_IB_HCA", "value": "mlx5"} in container["env"]
    assert container["resources"]["limits"]["rdma/hca"] == "2"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert all(
        "rdma" not in str(part) for part in rendered.container("demo-baton-router")["resources"].values()
    )


def test_an_upgrade_waits_for_gpus_unless_there_are_more() -> None:
    rendered = case("split-nccl-rdma")
    rolling = [
        rendered.one("Deployment", f"demo-baton-{role}")["spec"]["strategy"]["rollingUpdate"]
        for role in ("prefill", "decode", "router")
    ]
    assert rolling == [
        {"maxSurge": 0, "maxUnavailable": 1},
        {"maxSurge": 1, "maxUnavailable": 0},
        {"maxSurge": 1, "maxUnavailable": 0},
    ]


def test_shared_memory_is_a_volume_with_a_limit() -> None:
    spec = render_with("split", decode__shmSize="3Gi").pods()["demo-baton-decode"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "3Gi"}} in spec["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]


def test_runs_without_gpus() -> None:
    rendered = case("cpu")
    assert rendered.config("workers")["engine"]["device"] == "cpu"
    for spec in rendered.pods().values():
        for container in spec["containers"]:
            assert not [name for name in container["resources"].get("limits", {}) if "/" in name]


def test_mig_and_other_resource_names() -> None:
    container = case("placement").container("demo-baton-prefill")
    assert container["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == "1"


def test_settings_of_pods_are_common_or_a_roles_own() -> None:
    rendered = case("placement")
    templates = rendered.templates()
    pods = rendered.pods()
    prefill, decode, router = (pods[f"demo-baton-{role}"] for role in ("prefill", "decode", "router"))
    assert decode["nodeSelector"] == {"pool": "gpu"}
    assert router["nodeSelector"] == {"pool": "cpu"}
    assert prefill["tolerations"] == decode["tolerations"]
    assert {pod["priorityClassName"] for pod in (prefill, decode, router)} == {"llm"}
    assert decode["runtimeClassName"] == "nvidia"
    assert decode["schedulerName"] == "gpu-scheduler"
    assert "nodeAffinity" in prefill["affinity"]
    assert "affinity" not in decode
    assert templates["demo-baton-prefill"]["metadata"]["annotations"].items() >= {
        ("example.com/a", "common"),
        ("example.com/b", "prefill"),
    }
    assert templates["demo-baton-decode"]["metadata"]["labels"]["tier"] == "llm"
    assert decode["securityContext"]["supplementalGroups"] == [44]
    assert decode["securityContext"]["runAsNonRoot"] is True


def test_pods_of_a_role_spread() -> None:
    pods = case("placement").pods()
    (spread,) = pods["demo-baton-decode"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == (
        "kubernetes.io/hostname",
        "ScheduleAnyway",
    )
    assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "decode"
    (own,) = pods["demo-baton-router"]["topologySpreadConstraints"]
    assert (own["topologyKey"], own["maxSkew"]) == ("topology.kubernetes.io/zone", 2)
    assert own["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"


def test_extras_of_a_role() -> None:
    rendered = case("placement")
    decode, router = rendered.pods()["demo-baton-decode"], rendered.pods()["demo-baton-router"]
    main = decode["containers"][0]
    assert {"name": "EXTRA", "value": "common"} in main["env"]
    assert main["envFrom"] == [{"configMapRef": {"name": "more"}}]
    assert {"name": "scratch", "mountPath": "/scratch"} in main["volumeMounts"]
    assert {"name": "scratch", "emptyDir": {}} in decode["volumes"]
    assert [container["name"] for container in decode["containers"]] == ["decode", "beside"]
    assert [container["name"] for container in decode["initContainers"]] == ["before"]
    assert router["containers"][0]["args"] == ["--log-level", "debug"]
    maps = rendered.of_kind("ConfigMap")
    assert maps["extra"]["data"] == {"release": "demo"}
    assert "demo-text" in maps


def test_workers_have_names_and_addresses_of_their_pod() -> None:
    env = {one["name"]: one for one in case("split").container("demo-baton-decode")["env"]}
    assert env["BATON_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert env["BATON_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


@pytest.mark.parametrize("name", ["split", "ray"])
def test_ports_listen_at_all_addresses_of_a_pod_and_at_one_of_a_node(name: str) -> None:
    """`::` stands for those of both families, or of IPv4 where the node has no other."""
    for hosted in (False, True):
        containers = render_with(name, pod__hostNetwork=hosted).pods()
        variables = {
            (pod, one["name"]): one.get("value", one.get("valueFrom"))
            for pod, spec in containers.items()
            for one in spec["containers"][0].get("env", ())
        }
        listening = {
            pod.removeprefix("demo-baton-"): value
            for (pod, variable), value in variables.items()
            if variable in ("BATON_LISTEN_HOST", "BATON_ADMIN_HTTP_HOST")
        }
        assert {"router", "prefill" if name == "split" else "workers"} <= set(listening)
        at_pod = {"fieldRef": {"fieldPath": "status.podIP"}}
        assert [value for value in listening.values() if value != (at_pod if hosted else "::")] == []


def test_a_second_pool_joins_a_cluster() -> None:
    rendered = case("second-pool")
    assert set(rendered.of_kind("Deployment")) == {"demo-v2-workers"}
    assert rendered.of_kind("Secret") == {}
    template = rendered.templates()["demo-v2-workers"]
    assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "chat"
    sources = next(v for v in template["spec"]["volumes"] if v["name"] == "secrets")["projected"]["sources"]
    assert [source["secret"]["name"] for source in sources] == ["chat-secrets", "chat-redis"]
    assert "baton pool list" in rendered.notes
