"""Pods of the built images: values-cpu.yaml with prefill and decode apart, as the chart's user and as a
random user of group 0. `test_images.py` runs them in namespaces; BATON_IMAGES names the images."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.deploy.chart import Rendered
from tests.images.runc import ImageRuntime, read_images
from tests.manifests import network
from tests.manifests.load import answers
from tests.manifests.pod import Pod
from tests.manifests.releases import NAME, rendered
from tests.manifests.site import Site, site_of

Seen = defaultdict[str, list[tuple[int | None, int | None]]]
pytestmark = pytest.mark.asyncio(loop_scope="module")
ROLES = ("router", "prefill", "decode")
# A user of the range that OpenShift gives a namespace.
_ASSIGNED = 1_000_710_000
_FROZEN_S = 4.0
# A running container may be as slow as the machine is.
_PATIENT_S = 30.0
_PROBED_S = 60.0


@pytest.fixture(scope="session", autouse=True)
def bridge() -> None:
    network.make_bridge()


def admitted(release: Rendered, user: int) -> Rendered:
    """Pods without ids as OpenShift admits them: with a user and a group of volumes of the namespace's range;
    the group of processes is 0."""
    objects = copy.deepcopy(release.objects)
    for security in _security_contexts(objects):
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & security.keys()
        security |= {"runAsUser": user, "fsGroup": user}
    return Rendered(release.texts, objects)


def _security_contexts(objects: tuple[dict[str, Any], ...]) -> Iterator[dict[str, Any]]:
    for made in objects:
        if made["kind"] == "Deployment":
            yield made["spec"]["template"]["spec"]["securityContext"]
        elif made["kind"] == "Pod":
            yield made["spec"]["securityContext"]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["chart-user-tls", "random-user"])
async def release(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    tls = request.param == "chart-user-tls"
    folder = tmp_path_factory.mktemp(request.param)
    images = read_images(Path(os.environ["BATON_IMAGES"]))
    runtime = ImageRuntime(images, folder / "runc")
    made = rendered("split", tls=tls, drain_s=3)
    if not tls:
        nobody = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
        made = admitted(rendered("split", tls=tls, drain_s=3, pod__podSecurityContext=nobody), _ASSIGNED)
    began = time.monotonic()
    async with site_of(made, folder, tls=tls, runtime=runtime) as running:
        print(f"\nPROOF {request.param}: all pods ready after {time.monotonic() - began:.0f} s")
        yield running


def _pods(release: Site) -> list[Pod]:
    """The pods of a release whose images are built."""
    return [pod for role in ROLES for pod in release.cluster.pods[f"{NAME}-{role}"]]


async def test_containers_run_from_images_and_are_confined(release: Site) -> None:
    await release.containers_are_confined()
    asked = "id -G; grep -E '^(Cap|Seccomp:)' /proc/1/status; python -c 'import baton; print(baton.__file__)'"
    for pod in _pods(release):
        code, output = await pod.execute(["sh", "-c", asked], _PROBED_S)
        groups, *status, file = output.splitlines()
        assert code == 0, output
        assert {*map(int, groups.split())} == {pod.template.group, pod.template.fs_group}
        assert [line.split()[1].strip("0") for line in status] == ["", "", "", "", "", "2"], output
        assert file.startswith("/opt/baton/lib/"), file


async def test_ports_and_metrics(release: Site) -> None:
    await release.every_port_is_declared()
    await release.metrics_are_scraped()


async def test_requests_are_answered_over_grpc_and_http(release: Site) -> None:
    texts = await answers(release.endpoint)
    assert all(texts.values()), texts
    print(f"\nPROOF {len(texts)} prompts answered alike over gRPC and HTTP")


async def test_baton_check_passes_in_its_container(release: Site) -> None:
    await release.helm_test()


async def test_probes_of_a_frozen_container_fail_until_it_goes_on(release: Site) -> None:
    for pod in _pods(release):
        os.kill(pod.pid, signal.SIGSTOP)
        try:
            assert [await _status(pod, path) for path in ("/health", "/ready")] == [None, None], pod.name
        finally:
            os.kill(pod.pid, signal.SIGCONT)
        await _until(pod, "/health", 200)
        await _until(pod, "/ready", 200)


async def test_each_role_drains_under_load_and_ends_with_0(release: Site) -> None:
    """Probes are asked all the time. An old container is alive until it ends. A new one is ready only where
    it is alive, and becomes both. What is seen of a container that starts or drains is printed: either may
    say for less than a second that it is not ready."""
    old = {pod.name for pod in _pods(release)}
    seen: Seen = defaultdict(list)
    watching = asyncio.create_task(_watch(release, seen))
    await release.replaced_under_load(*ROLES, times=1, clients=1, pause_s=0.5)
    watching.cancel()
    await release.helm_test()
    for name, answered in seen.items():
        health = [alive for _, alive in answered]
        if name in old:
            print(f"\nPROOF {name}, (ready, alive) until it ended: {dict(Counter(answered))}", end="")
            assert {*health} <= {200, None}, (name, Counter(answered))
        else:
            print(f"\nPROOF {name}, (ready, alive) from its start on: {dict(Counter(answered))}", end="")
            assert (200, None) not in answered, (name, Counter(answered))
            assert (200, 503) not in answered, (name, Counter(answered))
            assert (200, 200) in answered, (name, Counter(answered))
    assert len(seen) == len(old) + len(ROLES)
    print(f"\nPROOF ended with exit code 0 after SIGTERM: {', '.join(sorted(old))}")


async def _watch(release: Site, seen: Seen) -> None:
    """Asks each pod's /ready, then its /health, again and again."""
    watched: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            for pod in _pods(release):
                if pod.name not in watched:
                    watched[pod.name] = group.create_task(_ask_on(pod, seen[pod.name]))
            await asyncio.sleep(0.02)


async def _ask_on(pod: Pod, answered: list[tuple[int | None, int | None]]) -> None:
    while True:
        ready = await _status(pod, "/ready", _PATIENT_S)
        answered.append((ready, await _status(pod, "/health", _PATIENT_S)))
        await asyncio.sleep(0.1)


async def _status(pod: Pod, path: str, within_s: float = _FROZEN_S) -> int | None:
    """The status that a container answers with; None: no answer in that time."""
    port = pod.template.container.ports["admin"]
    async with httpx.AsyncClient(timeout=within_s) as client:
        try:
            return (await client.get(f"http://{pod.address}:{port}{path}")).status_code
        except httpx.TransportError:
            return None


async def _until(pod: Pod, path: str, status: int) -> None:
    deadline = time.monotonic() + _PROBED_S
    while (found := await _status(pod, path)) != status:
        assert time.monotonic() < deadline, f"{pod.name} {path}: {found}"
        await asyncio.sleep(0.1)
