"""Behaviour of `baton up` by default, with a Ray of its own: one cluster, one test after the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.base.process_stat import is_running
from tests.e2e.support.cluster import (
    AGAIN_S,
    BATON,
    CLUSTER_SECRET,
    Cluster,
    baton_up,
    descendants,
    eventually,
    serves_again,
    whole_again,
)
from tests.e2e.support.proc import left_in_file_systems
from tests.support.checkpoints import make_checkpoint
from tests.support.command_lines import command_lines
from tests.support.reference import greedy_matches, load_reference

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

PROMPT = list(range(3, 60))
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# Processes of Ray: its reaper, control store, node, the two agents of a node, and an actor for each worker.
OF_RAY = 7


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    first, second = (make_checkpoint(folder / str(seed), seed=seed) for seed in (5, 6))
    return first, second


@pytest.fixture(scope="module")
def cluster(models: tuple[Path, Path]) -> Iterator[Cluster]:
    """A cluster for which nothing names a Ray, so that it starts one. The last test kills it."""
    with baton_up(models[0], "--dtype", "float64", ray="") as running:
        yield running


def commands(cluster: Cluster) -> dict[int, str]:
    """Every process below the cluster's, with its command line."""
    return command_lines(descendants(cluster.process.pid))


def actors(cluster: Cluster) -> int:
    """The number of worker actors that run on the cluster's Ray."""
    return sum(command.startswith("ray::WorkerActor") for command in commands(cluster).values())


async def right(cluster: Cluster, stub: RouterServiceAsyncStub, model: Path, count: int = 40) -> None:
    answer = await cluster.generate(stub, PROMPT, max_tokens=count, **GREEDY)
    assert len(answer.token_ids) == count
    greedy_matches(load_reference(model), PROMPT, answer.token_ids)


async def test_tokens_and_logs_are_as_without_ray(cluster: Cluster, models: tuple[Path, Path]) -> None:
    async with cluster.stub() as stub:
        await asyncio.gather(*(right(cluster, stub, models[0]) for _ in range(3)))
    assert "event='ray_joined'" in cluster.log.read_text()
    assert len(re.findall("event='serving'.*process='front'", cluster.log.read_text())) == 2


async def test_so_many_processes_are_of_ray(cluster: Cluster) -> None:
    all_of_them = commands(cluster).values()
    ours = [command for command in all_of_them if "-m services." in command or "valkey" in command]
    reaper = [command for command in ours if "services.cluster.on_ray.ray_reaper" in command]
    assert len(all_of_them) - len(ours) + len(reaper) == OF_RAY, all_of_them


async def test_a_worker_dies(cluster: Cluster, models: tuple[Path, Path]) -> None:
    async with cluster.stub() as stub:
        before = await cluster.reports()
        os.kill(before["decode-0"].engine_pid, signal.SIGKILL)
        await eventually(lambda: not is_running(before["decode-0"].front_pid), AGAIN_S)
        after = await whole_again(cluster, before, AGAIN_S)
        await serves_again(cluster, stub, PROMPT, AGAIN_S)
        await right(cluster, stub, models[0])
    assert after["prefill-0"].front_pid == before["prefill-0"].front_pid
    assert after["decode-0"].front_pid != before["decode-0"].front_pid


async def test_a_worker_is_drained_and_resumed(cluster: Cluster, models: tuple[Path, Path]) -> None:
    def drain(*flags: str) -> str:
        command = (*BATON, "drain", "decode-0", "--admin", cluster.admin_address, *flags)
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout

    assert "draining" in await asyncio.to_thread(drain)
    async with cluster.stub() as stub:
        waiting = asyncio.create_task(right(cluster, stub, models[0]))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await asyncio.to_thread(drain, "--resume")
        await waiting


async def test_the_router_is_started_again(cluster: Cluster, models: tuple[Path, Path]) -> None:
    before = await cluster.reports()
    (router,) = [pid for pid, command in commands(cluster).items() if command.endswith("services.router")]
    os.kill(router, signal.SIGKILL)
    async with cluster.stub() as stub:
        await serves_again(cluster, stub, PROMPT, AGAIN_S)
        await right(cluster, stub, models[0])
    after = await whole_again(cluster, before, AGAIN_S)
    assert {name: report.front_pid for name, report in after.items()} == {
        name: report.front_pid for name, report in before.items()
    }


async def test_another_model_is_a_guest_whose_workers_end_with_it(
    cluster: Cluster, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (reaper,) = [
        command for command in commands(cluster).values() if "services.cluster.on_ray.ray_reaper" in command
    ]
    folder = reaper.split("services.cluster.on_ray.ray_reaper ")[1].split()[0]
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", f"{folder}/token")
    secrets = cluster.log.parent / "secrets.yaml"
    secrets.write_text(f"cluster_secret: {CLUSTER_SECRET}\n")
    (address,) = set(re.findall("event='ray_joined'.* address='([^']+)'", cluster.log.read_text()))
    flags = ("--dtype", "float64", "--secrets-file", str(secrets), "--redis-url", "none")
    with baton_up(models[1], *flags, ray=address) as guest:
        async with cluster.stub() as stub, guest.stub() as other:
            await asyncio.gather(right(cluster, stub, models[0]), right(guest, other, models[1]))
        reports = await guest.reports()
        pids = [pid for report in reports.values() for pid in (report.front_pid, report.engine_pid)]
        guest.process.kill()
        await eventually(lambda: not any(map(is_running, pids)), 3)
        await eventually(lambda: actors(cluster) == 2, 3)
    async with cluster.stub() as stub:
        await right(cluster, stub, models[0])


async def test_a_killed_cluster_leaves_nothing(cluster: Cluster) -> None:
    """The last test: no process, socket, shared memory or folder stays."""
    pids = [cluster.process.pid, *commands(cluster)]
    assert any("gcs_server" in command for command in commands(cluster).values()), "this test sees nothing"
    named = left_in_file_systems(pids)
    assert any("plasma_store" in path for path in named), "this test sees nothing"
    cluster.process.kill()
    await eventually(lambda: not any(map(is_running, pids)), 10)
    own = cluster.log.parent
    others = [path for path in named if own not in (Path(path), *Path(path).parents)]
    with contextlib.suppress(AssertionError):
        await eventually(lambda: not left(others), 30)
    assert not left(others)


def left(paths: list[str]) -> list[str]:
    return [path for path in paths if os.path.exists(path)]
