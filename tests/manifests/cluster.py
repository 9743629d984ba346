"""A Kubernetes cluster of one machine, for one rendered release."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from services.common.processes.process_tree import descendants
from tests.deploy.chart import NAMESPACE, Rendered
from tests.manifests.container import HostRuntime
from tests.manifests.issuer import CertManager, Secret
from tests.manifests.manifests import Deployment, PodTemplate, read_deployment, read_pod, read_service
from tests.manifests.network import IPV4, Family, Network
from tests.manifests.pod import Ended, Pod, memory_of
from tests.manifests.runtime import Runtime
from tests.manifests.services import ServiceProxy
from tests.manifests.volumes import Kind

# Objects without a part in what runs; tests/deploy checks them.
_NOT_RUN = {"NetworkPolicy", "PodDisruptionBudget", "ServiceAccount"}
_OBJECTS: dict[str, tuple[Kind, str]] = {
    "ConfigMap": ("configMap", "data"),
    "Secret": ("secret", "stringData"),
}
_READ = {"Deployment", "Service", "Pod", "Certificate", "Issuer", *_OBJECTS}
_HOOK = "helm.sh/hook"


class Cluster:
    """Runs what a chart renders. `secrets`: those that the chart expects to be there."""

    def __init__(
        self,
        rendered: Rendered,
        secrets: Mapping[str, Secret],
        folder: Path,
        family: Family = IPV4,
        runtime: Runtime | None = None,
    ) -> None:
        unknown = {made["kind"] for made in rendered.objects} - _READ - _NOT_RUN
        assert not unknown, f"kinds that nothing here knows: {unknown}"
        self._rendered = rendered
        self._folder = folder
        self._runtime = runtime or HostRuntime()
        self._network = Network(family)
        self._numbers = itertools.count(1)
        self._issuer = CertManager()
        self.store: dict[tuple[Kind, str], dict[str, str]] = {}
        for made in rendered.objects:
            if made["kind"] in _OBJECTS:
                kind, key = _OBJECTS[made["kind"]]
                self.store[kind, made["metadata"]["name"]] = made[key]
        self.put_secrets({**secrets, **self._issuer.secrets(rendered.objects)})
        self.deployments = {
            name: read_deployment(made) for name, made in rendered.of_kind("Deployment").items()
        }
        self.services = {
            name: ServiceProxy(read_service(made), self._network.service_address(), self._all_pods)
            for name, made in rendered.of_kind("Service").items()
        }
        self.hooks = dict(read_pod(made) for made in rendered.of_kind("Pod").values() if _is_test(made))
        self.pods: dict[str, list[Pod]] = {name: [] for name in self.deployments}
        self.past: list[Pod] = []

    @property
    def issuer(self) -> CertManager:
        return self._issuer

    def put_secrets(self, secrets: Mapping[str, Secret]) -> None:
        self.store |= {("secret", name): dict(data) for name, data in secrets.items()}

    def renew_certificates(self, secrets: Mapping[str, Secret]) -> None:
        """Issues all certificates again, puts `secrets`, and brings all of it to the running pods."""
        self.put_secrets({**self._issuer.secrets(self._rendered.objects), **secrets})
        for pod in self._all_pods():
            pod.write_volumes(self.store)

    def _all_pods(self) -> list[Pod]:
        return [pod for pods in self.pods.values() for pod in pods]

    def _hosts(self) -> str:
        """The answers of DNS: the Service's address, or those of the pods of a headless one."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for name, proxy in self.services.items():
            domain = f"{name}.{NAMESPACE}"
            names = f"{name} {domain} {domain}.svc {domain}.svc.cluster.local"
            addresses = proxy.pod_addresses() if proxy.service.headless else [proxy.address]
            lines += [f"{address} {names}" for address in addresses]
        return "\n".join(lines) + "\n"

    def _tell_names(self, *starting: Pod) -> None:
        for pod in (*self._all_pods(), *starting):
            pod.write_hosts(self._hosts())

    async def start(self) -> None:
        """All at once, as Kubernetes does; returns when all pods are ready."""
        for proxy in self.services.values():
            if not proxy.service.headless:
                await proxy.start()
        for deployment in self.deployments.values():
            for _ in range(deployment.replicas):
                await self._add(deployment)
        for deployment in self.deployments.values():
            for pod in self.pods[deployment.name]:
                await pod.until_ready(deployment.progress_s)

    async def stop(self) -> None:
        """Ends all at once, without grace."""
        await asyncio.gather(*(pod.kill() for pod in self._all_pods()))
        for proxy in self.services.values():
            await proxy.stop()

    async def _add(self, deployment: Deployment) -> Pod:
        pod = self._pod(f"{deployment.name}-{next(self._numbers)}", deployment.template)
        self.pods[deployment.name].append(pod)
        self._tell_names()
        await pod.start(self.store)
        return pod

    def _pod(self, name: str, template: PodTemplate) -> Pod:
        return Pod(name, template, self._network, self._folder / name, self._runtime)

    async def replace(self, name: str, pause_s: float = 0.0) -> list[Ended]:
        """A rollout by the Deployment's strategy: new pods for all there are. Returns how the old ones
        ended. `pause_s`: seconds from the end of a pod to the start of the next one, where none may surge."""
        deployment = self.deployments[name]
        deadline = time.monotonic() + deployment.progress_s
        ended = []
        for old in list(self.pods[name]):
            if deployment.surge:
                await (await self._add(deployment)).until_ready(deadline - time.monotonic())
            ended.append(await old.delete())
            self.pods[name].remove(old)
            self._tell_names()
            self.past.append(old)
            if not deployment.surge:
                await asyncio.sleep(pause_s)
                await (await self._add(deployment)).until_ready(deadline - time.monotonic())
        return ended

    async def run_hook(self, name: str) -> tuple[int, str]:
        """Runs the pod of `helm test`: exit code and log."""
        template = self.hooks[name]
        pod = self._pod(f"{name}-{next(self._numbers)}", template)
        assert template.deadline_s is not None
        self._tell_names(pod)
        await pod.start(self.store)
        try:
            return await pod.ended(template.deadline_s), pod.log.read_text()
        finally:
            await pod.kill()

    def check(self) -> None:
        """Raises what a probe of any pod has found, or where one takes more memory than it may."""
        for pod in self._all_pods():
            pod.check()
            taken = memory_of([pod.pid, *descendants(pod.pid)])
            assert taken <= pod.template.container.memory_limit, f"{pod.name} takes {taken} bytes"


def _is_test(manifest: Mapping[str, Mapping[str, Mapping[str, str]]]) -> bool:
    return manifest["metadata"].get("annotations", {}).get(_HOOK) == "test"


@contextlib.asynccontextmanager
async def running(
    rendered: Rendered,
    secrets: Mapping[str, Secret],
    folder: Path,
    family: Family = IPV4,
    runtime: Runtime | None = None,
) -> AsyncIterator[Cluster]:
    """A cluster whose pods are ready; ended afterwards."""
    cluster = Cluster(rendered, secrets, folder, family, runtime)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()
