"""Additions of users: no list repeats its merge key, and the user's entry wins."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.deploy.chart import CASES, Object, Rendered, Values, case, put, render, render_with, values_of
from tests.deploy.kubernetes_schemas import NEWEST, errors_in
from tests.deploy.values.merge_keys import repeated

ROLES = ("router", "workerGroup", "prefill", "decode", "redis", "supervisor", "ray.head")
QUICK = ("default", "kuberay-production", "model-hub", "placement", "production")
PODS = ("demo-baton-router", "demo-baton-workers", "demo-baton-redis")


def _additions(rendered: Rendered) -> dict[str, list[Object]]:
    """Entries that repeat every merge key of every pod that is rendered, twice each."""
    specs = list(rendered.pods().values())
    containers = [one for spec in specs for one in (*spec["containers"], *spec.get("initContainers", ()))]
    env = [one["name"] for container in containers for one in container.get("env", ())]
    mounts = [one["mountPath"] for container in containers for one in container.get("volumeMounts", ())]
    volumes = [one["name"] for spec in specs for one in spec["volumes"]]
    return {
        "extraEnv": [{"name": name, "value": "own"} for name in (*env, *env)],
        "extraVolumes": [{"name": name, "emptyDir": {"medium": "Memory"}} for name in (*volumes, *volumes)],
        "extraVolumeMounts": [{"name": "tmp", "mountPath": path, "subPath": "own"} for path in mounts],
        "extraContainers": [
            {"name": "beside", "image": "busybox:1", "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}
        ]
        * 2,
        "extraInitContainers": [
            {"name": name, "image": "busybox:1", "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}
            for name in ("model", "ray-certificate", "before", "before")
        ],
        "topologySpreadConstraints": [
            {"maxSkew": 2, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway"}
            for key in ("kubernetes.io/hostname", "zone", "zone")
        ],
        "resourceClaims": [
            {"name": "gpu", "resourceClaimName": "one"},
            {"name": "gpu", "resourceClaimName": "two"},
        ],
        "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}, {"ip": "10.0.0.1", "hostnames": ["b"]}],
    }


def _wrong(values: Values) -> list[str]:
    return [
        one for made in render(values).objects if made["kind"] != "ScaledObject" for one in repeated(made)
    ]


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_repeated_without_additions(name: str) -> None:
    assert [one for made in case(name).objects for one in repeated(made)] == []


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK)]
)
def test_nothing_is_repeated_whatever_is_added_to_all_pods(name: str) -> None:
    values = values_of(name)
    values["pod"] = {**values.get("pod", {}), **_additions(case(name))}
    for role in ROLES:  # Lists of a role take the place of the common ones.
        for key in ("topologySpreadConstraints", "topologyKey"):
            section = values
            for part in role.split("."):
                section = section.get(part, {})
            section.pop(key, None)
    values["image"] = {**values.get("image", {}), "pullSecrets": ["a", {"name": "a"}, "b", "b"]}
    put(values, "nccl.env", {"NCCL_DEBUG": "INFO"})
    assert _wrong(values) == []


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_repeated_whatever_is_added_to_a_role(name: str, role: str) -> None:
    for key, added in _additions(case(name)).items():
        values = values_of(name)
        put(values, f"{role}.{key}", copy.deepcopy(added))
        put(values, f"pod.{key}", copy.deepcopy(added))
        assert _wrong(values) == [], key


def _variables(container: Object) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def test_a_variable_of_the_user_takes_the_place_of_the_charts() -> None:
    own = [
        {"name": "FIRST", "value": "1"},
        {"name": "OMP_NUM_THREADS", "value": "$(FIRST)"},
        {"name": "HOME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NCCL_DEBUG", "value": "WARN"},
    ]
    rendered = render_with("default", pod__extraEnv=own, nccl__env={"NCCL_DEBUG": "INFO"})
    container = rendered.container("demo-baton-workers")
    values = _variables(container)
    assert values["OMP_NUM_THREADS"] == "$(FIRST)"
    assert values["HOME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert values["NCCL_DEBUG"] == "WARN"
    # A variable refers to those before it.
    names = [one["name"] for one in container["env"]]
    assert names.index("FIRST") < names.index("OMP_NUM_THREADS")


def test_a_volume_and_a_mount_of_the_user_take_the_place_of_the_charts() -> None:
    rendered = render_with(
        "default",
        pod__extraVolumes=[{"name": "tmp", "hostPath": {"path": "/scratch"}}],
        pod__extraVolumeMounts=[{"name": "tmp", "mountPath": "/dev/shm"}],
    )
    spec = rendered.pods()["demo-baton-workers"]
    assert [one for one in spec["volumes"] if one["name"] == "tmp"] == [
        {"name": "tmp", "hostPath": {"path": "/scratch"}}
    ]
    mounts = spec["containers"][0]["volumeMounts"]
    assert [one["name"] for one in mounts if one["mountPath"] == "/dev/shm"] == ["tmp"]


def test_a_container_of_the_name_of_the_charts_is_merged_into_it_and_stays_the_first() -> None:
    more = {"name": "workers", "stdin": True, "env": [{"name": "HOME", "value": "/home"}]}
    spec = render_with("default", workerGroup__extraContainers=[more]).pods()["demo-baton-workers"]
    (container,) = spec["containers"]
    assert container["stdin"] is True
    assert container["command"][0] == "baton"
    assert _variables(container)["HOME"] == "/home"


def test_a_spread_rule_of_the_user_takes_the_place_of_that_for_hosts() -> None:
    rule = {"maxSkew": 3, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    spec = render_with("default", pod__topologySpreadConstraints=[rule]).pods()["demo-baton-router"]
    (made,) = spec["topologySpreadConstraints"]
    assert made["maxSkew"] == 3
    assert made["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"


def test_variables_of_a_role_come_behind_the_common_ones() -> None:
    rendered = render_with(
        "default",
        pod__extraEnv=[{"name": "HTTPS_PROXY", "value": "p"}, {"name": "A", "value": "common"}],
        router__extraEnv=[{"name": "A", "value": "router"}],
    )
    values = _variables(rendered.container("demo-baton-router"))
    assert (values["HTTPS_PROXY"], values["A"]) == ("p", "router")


def test_the_download_of_the_model_has_the_users_variables_and_files() -> None:
    rendered = render_with(
        "model-hub",
        pod__extraEnv=[
            {"name": "SSL_CERT_FILE", "value": "/etc/corp/ca.crt"},
            {"name": "HOME", "value": "/home"},
        ],
        pod__extraEnvFrom=[{"configMapRef": {"name": "proxy"}}],
        pod__extraVolumes=[{"name": "corp", "configMap": {"name": "corp-ca"}}],
        pod__extraVolumeMounts=[{"name": "corp", "mountPath": "/etc/corp"}],
    )
    for pod in ("demo-baton-router", "demo-baton-workers"):
        (init,) = rendered.pods()[pod]["initContainers"]
        assert _variables(init) == {"SSL_CERT_FILE": "/etc/corp/ca.crt", "HOME": "/home"}
        assert init["envFrom"] == [{"configMapRef": {"name": "proxy"}}]
        assert {"name": "corp", "mountPath": "/etc/corp"} in init["volumeMounts"]
        assert init["command"][:3] == ["baton", "model", "fetch"]


def test_overrides_are_merged_last_into_objects_of_a_kind_and_of_a_component() -> None:
    rendered = render_with(
        "default",
        overrides={
            "Deployment": {"spec": {"revisionHistoryLimit": 2, "template": {"spec": {"hostUsers": False}}}},
            "Deployment/router": {
                "spec": {
                    "minReadySeconds": 10,
                    "strategy": {"rollingUpdate": {"maxSurge": "50%"}},
                    "template": {
                        "spec": {"containers": [{"name": "router", "tty": True, "lifecycle": None}]}
                    },
                }
            },
            "Service": {"spec": {"ipFamilyPolicy": "PreferDualStack"}},
            "Service/router": {"metadata": {"annotations": {"a": "b"}}},
        },
    )
    router, workers = (
        rendered.one("Deployment", f"demo-baton-{name}")["spec"] for name in ("router", "workers")
    )
    assert router["revisionHistoryLimit"] == workers["revisionHistoryLimit"] == 2
    assert (router.get("minReadySeconds"), workers.get("minReadySeconds")) == (10, None)
    assert router["strategy"]["rollingUpdate"] == {"maxSurge": "50%", "maxUnavailable": 0}
    (container,) = router["template"]["spec"]["containers"]
    assert container["tty"] is True
    assert "lifecycle" not in container
    assert container["command"]
    assert workers["template"]["spec"]["hostUsers"] is False
    services = rendered.of_kind("Service").values()
    assert all(service["spec"]["ipFamilyPolicy"] == "PreferDualStack" for service in services)


def test_probes_dns_and_host_network_have_keys() -> None:
    rendered = render_with(
        "default",
        pod__probes={"readiness": {"periodSeconds": 7}, "liveness": {"failureThreshold": 20}},
        pod__dnsConfig={"options": [{"name": "ndots", "value": "1"}]},
        pod__hostAliases=[{"ip": "10.0.0.1", "hostnames": ["registry"]}],
        workerGroup__hostNetwork=True,
    )
    for pod in PODS:
        spec = rendered.pods()[pod]
        assert spec["containers"][0]["readinessProbe"]["periodSeconds"] == 7
        assert spec["containers"][0]["livenessProbe"]["failureThreshold"] == 20
        assert spec["dnsConfig"]["options"]
        assert spec["hostAliases"] == [{"ip": "10.0.0.1", "hostnames": ["registry"]}]
    workers = rendered.pods()["demo-baton-workers"]
    assert (workers["hostNetwork"], workers["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert "hostNetwork" not in rendered.pods()["demo-baton-router"]


_TARGET = {"type": "Utilization", "averageUtilization": 80}
# What other charts have keys for and this one has not: kind and component, fields, and the values that make
# the object.
WITHOUT_A_KEY: tuple[tuple[str, Object, Values], ...] = (
    ("Deployment", {"revisionHistoryLimit": 2}, {}),
    ("Deployment/router", {"minReadySeconds": 10}, {}),
    (
        "Deployment/router",
        {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 2, "maxUnavailable": 1}}},
        {},
    ),
    ("Service/router", {"sessionAffinity": "ClientIP"}, {}),
    ("PodDisruptionBudget/router", {"maxUnavailable": None, "minAvailable": 1}, {}),
    (
        "HorizontalPodAutoscaler/router",
        {
            "metrics": [
                {
                    "type": "Resource",
                    "resource": {
                        "name": "memory",
                        "target": {"type": "Utilization", "averageUtilization": 80},
                    },
                }
            ]
        },
        {"router.autoscaling.enabled": True},
    ),
    (
        "ServiceMonitor/router",
        {
            "endpoints": [
                {
                    "port": "admin",
                    "scrapeTimeout": "10s",
                    "relabelings": [{"targetLabel": "cluster", "replacement": "eu"}],
                }
            ]
        },
        {"monitoring.serviceMonitor.enabled": True},
    ),
)


@pytest.mark.parametrize(("place", "fields", "made_by"), WITHOUT_A_KEY)
def test_what_has_no_key_of_its_own_is_set_by_overrides(place: str, fields: Object, made_by: Values) -> None:
    values = values_of("default")
    for path, value in made_by.items():
        put(values, path, value)
    values["overrides"] = {place: {"spec": fields}}
    kind, _, component = place.partition("/")
    found = [
        made
        for made in render(values).of_kind(kind).values()
        if component in ("", made["metadata"]["labels"]["app.kubernetes.io/component"])
    ]
    assert found
    for made in found:
        for field, value in fields.items():
            if value is None:
                assert field not in made["spec"]
            else:
                assert made["spec"][field] == value
        if kind != "ServiceMonitor":  # of which the tests know the chart's own fields alone
            assert errors_in(made, NEWEST) == []


def test_scalers_of_workers_may_go_to_no_pod_by_a_trigger_of_the_user() -> None:
    trigger = {
        "type": "cron",
        "metadata": {"timezone": "UTC", "start": "0 7 * * *", "end": "0 19 * * *", "desiredReplicas": "2"},
    }
    fallback = {"failureThreshold": 3, "replicas": 4}
    scaling = {"enabled": True, "minReplicas": 0, "triggers": [trigger], "fallback": fallback}
    spec = render_with("default", workerGroup__autoscaling=scaling).one("ScaledObject", "demo-baton-workers")[
        "spec"
    ]
    assert spec["minReplicaCount"] == 0
    assert spec["triggers"][-1] == trigger
    assert spec["fallback"] == fallback
