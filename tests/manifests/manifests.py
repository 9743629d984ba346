"""Pods and Services of the rendered chart, read completely: an unknown key is an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.manifests.fields import Fields
from tests.manifests.volumes import Volume, bytes_of, read_volume

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Probe:
    """A probe's question: `path` of a GET, or None for a connection; a failure is one that lasts
    `fails_after_s`."""

    port: str
    path: str | None
    timeout_s: float
    fails_after_s: float


@dataclass(frozen=True)
class Variable:
    """A variable with a value, or one with a field of the pod."""

    name: str
    value: str | None
    field: str | None


@dataclass(frozen=True)
class Mount:
    volume: str
    path: str
    read_only: bool


@dataclass(frozen=True)
class Container:
    name: str
    image: str
    command: tuple[str, ...]
    variables: tuple[Variable, ...]
    ports: Mapping[str, int]
    startup: Probe | None
    liveness: Probe | None
    readiness: Probe | None
    pre_stop: tuple[str, ...]
    mounts: tuple[Mount, ...]
    memory_limit: int


@dataclass(frozen=True)
class PodTemplate:
    """`init`: what runs to its end before the container; `user`, `group`: ids that its processes run as;
    `fs_group`: the group that owns files of volumes."""

    labels: Labels
    init: tuple[Container, ...]
    container: Container
    volumes: Mapping[str, Volume]
    user: int
    group: int
    fs_group: int
    grace_s: float
    deadline_s: float | None


@dataclass(frozen=True)
class Deployment:
    """`surge`: pods that a rollout may have beyond `replicas`; `recreate`: old pods end first."""

    name: str
    replicas: int
    surge: int
    unavailable: int
    progress_s: float
    template: PodTemplate


@dataclass(frozen=True)
class ServicePort:
    name: str
    port: int
    target: str


@dataclass(frozen=True)
class Service:
    name: str
    selector: Labels
    ports: tuple[ServicePort, ...]
    headless: bool
    not_ready_too: bool


def read_deployment(manifest: Mapping[str, Any]) -> Deployment:
    with Fields(manifest, "Deployment") as top:
        top.expect("apiVersion", "apps/v1")
        top.expect("kind", "Deployment")
        name = read_metadata(top)[0]
        with top.section("spec") as spec:
            replicas = spec.take("replicas")
            progress_s = spec.take("progressDeadlineSeconds", 600)
            surge, unavailable = _strategy(spec, replicas)
            with spec.section("selector") as selector:
                selected = selector.take("matchLabels")
            with spec.section("template") as template:
                pod = _pod(template)
    assert selected.items() <= pod.labels.items(), f"{name} does not select its own pods"
    return Deployment(name, replicas, surge, unavailable, progress_s, pod)


def _strategy(spec: Fields, replicas: int) -> tuple[int, int]:
    with spec.section("strategy") as strategy:
        kind = strategy.take("type", "RollingUpdate")
        if kind == "Recreate":
            return 0, replicas
        with strategy.section("rollingUpdate") as rolling:
            return rolling.take("maxSurge"), rolling.take("maxUnavailable")


def read_pod(manifest: Mapping[str, Any]) -> tuple[str, PodTemplate]:
    """The name of a Pod that no Deployment makes, and the pod."""
    with Fields(manifest, "Pod") as top:
        top.expect("apiVersion", "v1")
        top.expect("kind", "Pod")
        return manifest["metadata"]["name"], _pod(top)


def read_service(manifest: Mapping[str, Any]) -> Service:
    with Fields(manifest, "Service") as top:
        top.expect("apiVersion", "v1")
        top.expect("kind", "Service")
        name = read_metadata(top)[0]
        with top.section("spec") as spec:
            spec.expect("type", "ClusterIP")
            not_ready_too = spec.take("publishNotReadyAddresses", False)
            address = spec.take("clusterIP", None)
            assert address in (None, "None")
            selector = spec.take("selector")
            ports = []
            for port in spec.sections("ports"):
                with port:
                    port.expect("appProtocol", "http", "https", "kubernetes.io/h2c")  # for gateways
                    ports.append(ServicePort(port.take("name"), port.take("port"), port.take("targetPort")))
    return Service(name, selector, tuple(ports), address == "None", not_ready_too)


def read_metadata(top: Fields) -> tuple[str, Labels]:
    """Name and labels. Annotations are for Helm, and make a new pod of a changed configuration."""
    with top.section("metadata") as metadata:
        metadata.ignore("namespace", "annotations")
        return metadata.take("name", ""), metadata.take("labels", {})


def _pod(top: Fields) -> PodTemplate:
    _, labels = read_metadata(top)
    with top.section("spec") as spec:
        # Pods without rights at the API server, variables of other Services, or a choice of nodes.
        spec.ignore("serviceAccountName", "topologySpreadConstraints")
        spec.expect("automountServiceAccountToken", False)
        spec.expect("enableServiceLinks", False)
        spec.expect("restartPolicy", "Never", "Always")
        user, group, fs_group = _pod_security(spec)
        volumes = dict(read_volume(volume) for volume in spec.sections("volumes"))
        (container,) = (_container(one) for one in spec.sections("containers"))
        init = tuple(_container(one) for one in spec.sections("initContainers"))
        mounted = {mount.volume for one in (*init, container) for mount in one.mounts}
        unknown = mounted - volumes.keys()
        assert not unknown, f"mounts of no volume: {unknown}"
        unused = volumes.keys() - mounted
        assert not unused, f"volumes that nothing mounts: {unused}"
        grace_s, deadline_s = (
            spec.take("terminationGracePeriodSeconds", 30),
            spec.take("activeDeadlineSeconds", None),
        )
    return PodTemplate(labels, init, container, volumes, user, group, fs_group, grace_s, deadline_s)


def _pod_security(spec: Fields) -> tuple[int, int, int]:
    """User, group and the group of volumes. A user without a group is of group 0."""
    with spec.section("securityContext") as security:
        security.expect("runAsNonRoot", True)
        security.expect("fsGroupChangePolicy", "OnRootMismatch")
        security.expect("seccompProfile", {"type": "RuntimeDefault"})
        user, group, fs_group = (
            security.take("runAsUser"),
            security.take("runAsGroup", 0),
            security.take("fsGroup"),
        )
        assert user, "runs as root"
    return user, group, fs_group


def _container(fields: Fields) -> Container:
    with fields as one:
        one.expect("imagePullPolicy", "IfNotPresent")
        with one.section("securityContext") as security:
            # As every container is run here.
            security.expect("allowPrivilegeEscalation", False)
            security.expect("capabilities", {"drop": ["ALL"]})
            assert security.take("readOnlyRootFilesystem") is True
        with one.section("resources") as resources:
            resources.ignore("requests")
            with resources.section("limits") as limits:
                memory = bytes_of(limits.take("memory"))
        ports = dict(_container_port(port) for port in one.sections("ports"))
        return Container(
            name=one.take("name"),
            image=one.take("image"),
            command=(*one.take("command"), *one.take("args", ())),
            variables=tuple(_variable(variable) for variable in one.sections("env")),
            ports=ports,
            startup=_probe(one, "startupProbe"),
            liveness=_probe(one, "livenessProbe"),
            readiness=_probe(one, "readinessProbe"),
            pre_stop=_pre_stop(one),
            mounts=tuple(_mount(mount) for mount in one.sections("volumeMounts")),
            memory_limit=memory,
        )


def _container_port(fields: Fields) -> tuple[str, int]:
    with fields as port:
        return port.take("name"), port.take("containerPort")


def _variable(fields: Fields) -> Variable:
    with fields as variable:
        name, value = variable.take("name"), variable.take("value", None)
        with variable.section("valueFrom") as source, source.section("fieldRef") as reference:
            field = reference.take("fieldPath", None)
    assert (value is None) != (field is None), name
    return Variable(name, value, field)


def _mount(fields: Fields) -> Mount:
    with fields as mount:
        return Mount(mount.take("name"), mount.take("mountPath"), mount.take("readOnly", False))


def _pre_stop(container: Fields) -> tuple[str, ...]:
    with (
        container.section("lifecycle") as lifecycle,
        lifecycle.section("preStop") as hook,
        hook.section("exec") as executed,
    ):
        return tuple(executed.take("command", ()))


def _probe(container: Fields, key: str) -> Probe | None:
    fields = container.take(key, None)
    if fields is None:
        return None
    with Fields(fields, key) as probe:
        fails_after_s = probe.take("periodSeconds", 10) * probe.take("failureThreshold", 3)
        timeout_s = probe.take("timeoutSeconds", 1)
        tcp = probe.take("tcpSocket", None)
        if tcp is not None:
            return Probe(tcp["port"], None, timeout_s, fails_after_s)
        with probe.section("httpGet") as get:
            return Probe(get.take("port"), get.take("path"), timeout_s, fails_after_s)
