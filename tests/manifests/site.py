"""A running release with all that tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import httpx

from tests.certificates import Authority, Issued
from tests.deploy.chart import Rendered
from tests.manifests.cluster import Cluster, running
from tests.manifests.internal_ports import (
    allowed_ports,
    answer,
    calling_context,
    internal,
    listening,
    served_certificate,
    strangers,
)
from tests.manifests.load import Endpoint, refusals, steady_load
from tests.manifests.notes import Notes
from tests.manifests.pod import Pod
from tests.manifests.releases import NAME, TEST, OwnCertificates, Topology, rendered
from tests.manifests.runtime import Runtime

_COMMAND_S = 60.0
_COMMANDS_S = 300.0
_FOLLOWED_S = 60.0  # A process looks at its certificates every 5 s.
_DOMAIN = f"{NAME}.baton.internal"


class Site:
    """One release. `certificates`: None in plaintext."""

    def __init__(
        self, release: Rendered, cluster: Cluster, certificates: OwnCertificates | None, folder: Path
    ) -> None:
        self.release = release
        self.cluster = cluster
        self.certificates = certificates
        self._folder = folder
        client = None if certificates is None else certificates.client_folder(folder / "client")
        proxy = cluster.services[NAME]
        ports = {port.name: port.port for port in proxy.service.ports}
        key = None if certificates is None else certificates.api_keys[0]
        self.endpoint = Endpoint(proxy.address, ports["http"], ports["grpc"], client, key)

    @property
    def authority(self) -> Authority:
        """The authority of the certificates between processes."""
        return self.cluster.issuer.authorities[f"{NAME}-authority"]

    def workers(self) -> list[Pod]:
        names = {name for name in self.cluster.pods if name.endswith(("-workers", "-prefill", "-decode"))}
        return [pod for name in sorted(names) for pod in self.cluster.pods[name]]

    async def helm_test(self) -> None:
        """Runs the command of the hook: all of its questions are answered."""
        code, output = await self.cluster.run_hook(TEST)
        assert code == 0, output
        assert len(output.splitlines()) == 5, output

    async def containers_are_confined(self) -> None:
        """Asserts that containers run as their user, without capabilities, and write to their own volumes
        alone."""
        asked = 'exec 2>&1; id -u; grep -E "^(CapEff|NoNewPrivs)" /proc/1/status; '
        asked += 'grep " / " /proc/self/mounts; touch /tmp/a || true; touch /a /usr/a'
        for pods in self.cluster.pods.values():
            for pod in pods:
                _, output = await pod.execute(["sh", "-c", asked], _COMMAND_S)
                user, capabilities, privileges, root, *refused = output.splitlines()
                assert int(user) == pod.template.user
                assert (capabilities.split()[1].strip("0"), privileges.split()[1]) == ("", "1"), output
                assert len(refused) == 2, output
                assert "ro" in root.split()[3].split(","), output
                # An image's own folders are root's as well.
                assert all(re.search("Read-only file system|Permission denied", line) for line in refused), (
                    output
                )

    async def commands_of_the_notes_work(self) -> None:
        """Runs the notes' commands: those that ask from outside, and those that `kubectl exec` runs in a
        router; `status --watch` needs a terminal."""
        folder = self._folder / "notes"
        folder.mkdir()
        if self.endpoint.certificates is not None:
            files = {"ca.crt": "ca.crt", "tls.crt": "client.crt", "tls.key": "client.key"}
            for name, copy in files.items():
                (folder / copy).write_bytes((self.endpoint.certificates / name).read_bytes())
        notes = Notes(self.release.notes, folder)
        output = await notes.run(self.cluster.services[NAME], self.cluster.store, _COMMANDS_S)
        for wanted in ('"text_completion"', '{"status": "SERVING"}', "20 requests, failed: none"):
            assert wanted in output, output
        (router,) = self.cluster.pods[f"{NAME}-router"]
        found = re.findall(r"exec deployment/\S+-router -c router -- (.*)$", self.release.notes, re.M)
        assert found == ["baton status"], found
        for command in found:
            code, output = await router.execute(command.split(), _COMMAND_S)
            assert code == 0, output

    async def every_port_is_declared(self) -> None:
        """Each port that a container declares listens, and what listens may be reached by some peer."""
        policies = self.release.of_kind("NetworkPolicy")
        for pods in self.cluster.pods.values():
            for pod in pods:
                missing = {*pod.template.container.ports.values()} - listening(pod)
                assert not missing, f"{pod.name} does not listen at {missing}"
                unreachable = listening(pod) - allowed_ports(policies, pod)
                assert not unreachable, f"{pod.name} listens at {unreachable}, which no policy opens"

    async def strangers_get_nothing(self) -> None:
        """On each internal port of each worker and on the bundled Valkey's, while a router's certificate is
        answered; on the public ports, while a client's is."""
        assert self.certificates is not None
        workers = [(pod, port) for pod in self.workers() for port in sorted(internal(pod))]
        assert {pod.name for pod, _ in workers} == {pod.name for pod in self.workers()}
        inside = workers + self._ports("redis", "redis")
        await self._know_only(inside, self.authority, self.authority, f"router.{_DOMAIN}")
        public = self._ports("router", "http", "grpc")
        await self._know_only(public, self.certificates.servers, self.certificates.clients, "a client")

    def _ports(self, component: str, *names: str) -> list[tuple[Pod, int]]:
        pods = self.cluster.pods[f"{NAME}-{component}"]
        return [(pod, pod.template.container.ports[name]) for pod in pods for name in names]

    async def _know_only(
        self, asked: Sequence[tuple[Pod, int]], servers: Authority, clients: Authority, name: str
    ) -> None:
        """Asserts that these ports answer a client with a certificate by `clients`, and no other client."""
        for who, context in strangers(servers, clients, name, self._folder):
            answers = await asyncio.gather(*(answer(pod, port, context) for pod, port in asked))
            assert not any(answers), f"{who} is answered: {answers}"
        known = calling_context(servers, clients.issue(name), self._folder)
        answers = await asyncio.gather(*(answer(pod, port, known) for pod, port in asked))
        assert all(answers), f"{name} is not answered: {answers}"

    async def keys_are_followed(self) -> None:
        """Calls without an API key or with a wrong one are refused; a new one is known without a restart."""
        assert self.certificates is not None
        new = dataclasses.replace(self.endpoint, api_key="the-second-key")
        for endpoint in (dataclasses.replace(self.endpoint, api_key=None), new):
            assert len(await refusals(endpoint)) == 2
        assert not await refusals(self.endpoint)
        self.certificates.api_keys = ("the-second-key", "the-first-key")
        self.renew_certificates()
        deadline = time.monotonic() + _FOLLOWED_S
        while found := await refusals(new):
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.5)

    async def metrics_are_scraped(self) -> None:
        """Asserts that metrics are served at each port that a Service for monitors names."""
        for proxy in self.cluster.services.values():
            for port in proxy.service.ports:
                if port.name == "admin" or port.name.startswith("metrics-"):
                    endpoints = proxy.endpoints(port)
                    assert endpoints, f"{proxy.service.name} has no pod at {port.name}"
                    for address, number in endpoints:
                        async with httpx.AsyncClient(timeout=_COMMAND_S) as client:
                            response = await client.get(f"http://{address}:{number}/metrics")
                        assert "baton_" in response.text, f"{proxy.service.name}, {port.name}"

    def renew_certificates(self) -> None:
        assert self.certificates is not None
        self.cluster.renew_certificates(self.certificates.secrets())

    async def until_renewed(self) -> None:
        """Waits until each worker's first port presents the certificate that was issued last."""
        deadline = time.monotonic() + _FOLLOWED_S
        client = self.authority.issue(f"router.{_DOMAIN}")
        for pod in self.workers():
            component = pod.template.labels["app.kubernetes.io/component"]
            issued = self.cluster.store["secret", f"{NAME}-{component}-internal-tls"]["tls.crt"]
            port = pod.template.container.ports["grpc-0"]
            while await self._served(pod, port, client) != issued:
                assert time.monotonic() < deadline, f"{pod.name} presents the old certificate"
                await asyncio.sleep(0.2)

    async def _served(self, pod: Pod, port: int, client: Issued) -> str:
        return await asyncio.to_thread(served_certificate, pod, port, self.authority, client, self._folder)

    async def replaced_under_load(
        self, *roles: str, times: int, clients: int, pause_s: float = 0.2, codes: Mapping[str, int] = {}
    ) -> None:
        """Rollouts of the Deployments, one after the other: no request fails, answers stay what they were,
        and each old pod ends with exit code 0, or that in `codes`, within its grace period."""
        async with steady_load(self.endpoint, clients, pause_s) as load:
            for role in roles * times:
                deployment = self.cluster.deployments[f"{NAME}-{role}"]
                for ended in await self.cluster.replace(deployment.name):
                    assert ended.code == codes.get(role, 0), self.cluster.past[-1].why(
                        f"{role}: exit code {ended.code}"
                    )
                    assert ended.after_s < deployment.template.grace_s, role
                self.cluster.check()
                await load.goes_on()
                assert not load.failed, f"{role}: {load.failed[:3]}"


@contextlib.asynccontextmanager
async def site(topology: Topology, folder: Path, *, tls: bool, drain_s: int = 5) -> AsyncIterator[Site]:
    """A release whose pods are ready."""
    async with site_of(rendered(topology, tls=tls, drain_s=drain_s), folder, tls=tls) as made:
        yield made


@contextlib.asynccontextmanager
async def site_of(
    release: Rendered, folder: Path, *, tls: bool, runtime: Runtime | None = None
) -> AsyncIterator[Site]:
    """Objects of a render, whose pods are ready."""
    certificates = OwnCertificates() if tls else None
    secrets = {} if certificates is None else certificates.secrets()
    async with running(release, secrets, folder, runtime=runtime) as cluster:
        yield Site(release, cluster, certificates, folder)
