"""Workers on a Ray of the cluster's own, and of others: whatever is killed or frozen, the cluster serves
again, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from baton.base.process_stat import is_running, process_stat
from baton.v1.worker_pb2 import IntegrityReport
from services.cluster.on_ray.ray_node import RayNode
from tests.e2e.support.cluster import (
    CLUSTER_SECRET,
    Cluster,
    baton_up,
    descendants,
    eventually,
    serves_again,
    starting_up,
    whole_again,
)
from tests.e2e.support.proc import occurrences
from tests.e2e.support.redis_server import RedisServer, redis_server
from tests.support.checkpoints import make_checkpoint
from tests.support.command_lines import command_line, command_lines
from tests.support.reference import greedy_matches, load_reference

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

pytestmark = pytest.mark.slow

PROMPT = list(range(3, 60))
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
WORKERS = ("prefill-0", "decode-0")
# Secrets that are looked for where they must not be.
PREFIX_SECRET = "canary-6b1f0d9c52e84a77"
SECRETS = f"prefix_secret: {PREFIX_SECRET}\ncluster_secret: {CLUSTER_SECRET}\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=5)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def cluster(model: Path, redis: RedisServer) -> Iterator[Cluster]:
    """One for all tests that leave it as they found it: serving."""
    config = f"{SECRETS}state: {{redis_url: '{redis.url}'}}\n"
    with baton_up(model, "--dtype", "float64", config=config, ray="local") as running:
        yield running


def again_s() -> float:
    """Ten seconds where nothing else runs, as many times more as others keep the cores busy."""
    return 10.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def processes(cluster: Cluster) -> dict[int, str]:
    """Every process of the cluster, with its command line."""
    return command_lines(descendants(cluster.process.pid))


def parent(pid: int) -> int:
    stat = process_stat(pid)
    assert stat is not None
    return stat.parent


def halves(report: IntegrityReport) -> tuple[int, int]:
    """The processes of a worker: its front and its engine."""
    return report.front_pid, report.engine_pid


async def ends_well_or_typed(cluster: Cluster, stub: RouterServiceAsyncStub, model: Path) -> bool:
    """One request: every token right (True), or an error that says what happened and that may be retried."""
    try:
        answer = await cluster.generate(stub, PROMPT, max_tokens=400, **GREEDY)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE or not error.details():
            raise
        return False
    assert len(answer.token_ids) == 400
    greedy_matches(load_reference(model), PROMPT, answer.token_ids)
    return True


@pytest.mark.parametrize(
    ("victims", "number"),
    [
        (("prefill-0 engine",), signal.SIGKILL),
        (("decode-0 front",), signal.SIGKILL),
        (("decode-0 actor",), signal.SIGKILL),
        (("decode-0 engine", "prefill-0 front"), signal.SIGSTOP),
    ],
)
async def test_serves_again(
    cluster: Cluster, model: Path, victims: tuple[str, ...], number: signal.Signals
) -> None:
    async with cluster.stub() as stub:
        before = await whole_again(cluster, WORKERS, again_s())
        hit = dict(victim.split() for victim in victims)
        running = [asyncio.create_task(ends_well_or_typed(cluster, stub, model)) for _ in range(3)]
        await asyncio.sleep(0.2)
        for name, part in hit.items():
            front, engine = halves(before[name])
            os.kill({"front": front, "engine": engine, "actor": parent(front)}[part], number)
        # A front kills a frozen engine after 2 s; a frozen front is killed by its supervisor after 5 s.
        hang_s = 8.0 if number is signal.SIGSTOP else 0.0
        dead = [pid for name in hit for pid in halves(before[name])]
        await eventually(lambda: not any(map(is_running, dead)), 3 + hang_s)
        after = await whole_again(cluster, WORKERS, again_s())
        await serves_again(cluster, stub, PROMPT, again_s())
        await asyncio.gather(*running)
        for name in WORKERS:
            if name in hit:
                assert set(halves(after[name])).isdisjoint(dead)
            else:
                assert halves(after[name]) == halves(before[name]), "the other one was not to blame"
        assert await ends_well_or_typed(cluster, stub, model)


async def test_two_side_by_side_and_a_killed_one_leaves_nothing(cluster: Cluster, model: Path) -> None:
    async with cluster.stub() as stub:
        await whole_again(cluster, WORKERS, again_s())
        ours = {pid for pid, command in processes(cluster).items() if "services." in command}
        with baton_up(model, "--dtype", "float64", "--both", "1", ray="local") as second:
            async with second.stub() as other:
                both = await asyncio.gather(
                    ends_well_or_typed(cluster, stub, model), ends_well_or_typed(second, other, model)
                )
                assert all(both)
                assert list(await second.reports()) == ["both-0"]
                assert sorted(await cluster.reports()) == sorted(WORKERS)
            left = processes(second)
            assert any("raylet" in command for command in left.values()), "no Ray, or this test sees nothing"
            folder = ray_folder(left)
            second.process.kill()
            await eventually(lambda: not any(is_running(pid) for pid in left) and not folder.exists(), 10)
        assert await ends_well_or_typed(cluster, stub, model)
        assert {pid for pid, command in processes(cluster).items() if "services." in command} == ours


async def test_killed_together_with_the_owner_of_ray_nothing_stays(model: Path) -> None:
    """The parent and the owner of Ray are killed at once; the reaper ends the rest."""
    with baton_up(model, ray="local") as cluster:
        left = processes(cluster)
        (owner,) = [pid for pid, command in left.items() if command.rstrip().endswith("-m services.cluster")]
        cluster.process.kill()
        os.kill(owner, signal.SIGKILL)
        await eventually(lambda: not any(is_running(pid) for pid in left), 10)


async def test_it_comes_to_a_running_ray_as_a_guest(
    model: Path, redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGTERM or SIGKILL its workers end too, and Ray is as it was before. Its secrets are read
    from a file on each machine, and do not pass through that Ray."""
    file = tmp_path / "secrets.yaml"
    file.write_text(f"{SECRETS}redis_url: '{redis.url}'\n")
    theirs = RayNode.head({}, prestarted=1, gpus=0, room={})
    try:
        address = await theirs.address()
        for name, value in theirs.environment.items():
            monkeypatch.setenv(name, value)
        for number in (signal.SIGTERM, signal.SIGKILL):
            flags = ("--dtype", "float64", "--both", "1", "--secrets-file", str(file))
            with baton_up(model, *flags, ray=address) as cluster:
                async with cluster.stub() as stub:
                    assert await ends_well_or_typed(cluster, stub, model)
                    reports = await cluster.reports()
                pids = [pid for report in reports.values() for pid in halves(report)]
                for secret in (PREFIX_SECRET, CLUSTER_SECRET, redis.password):
                    assert occurrences(pids[0], secret.encode()) > 0
                no_secret_in(of_ray(os.getpid()), redis)
                pids += [parent(report.front_pid) for report in reports.values()]
                cluster.process.send_signal(number)
                code = await asyncio.to_thread(cluster.process.wait, 30)
                assert code == (0 if number is signal.SIGTERM else -signal.SIGKILL)
                await eventually(lambda pids=pids: not any(is_running(pid) for pid in pids), 3)  # type: ignore[misc]
            assert not theirs.lost()
        # The environment of `baton up` has the cluster's secret, that of this Ray has not.
        with starting_up(model, "--both", "1", ray=address) as (process, log):
            assert await asyncio.to_thread(process.wait, 60) == 2
            last = log.read_text().splitlines()[-1]
            assert last.startswith("baton: error: both-0: BATON_CLUSTER_SECRET is not set where the worker")
    finally:
        await theirs.stop()


async def test_no_process_of_ray_holds_a_secret(cluster: Cluster, redis: RedisServer) -> None:
    """No secret is held even after actors and workers were started again, as in the tests above."""
    front = next(pid for pid, command in processes(cluster).items() if "services.worker" in command)
    for secret in (PREFIX_SECRET, CLUSTER_SECRET, redis.password):
        assert occurrences(front, secret.encode()) > 0, "this scan finds nothing anywhere"
    no_secret_in(of_ray(cluster.process.pid), redis)


def of_ray(ancestor: int) -> list[int]:
    """Control stores and raylets below a process; those of other tests' clusters may be among them."""
    names = {pid: command_line(pid)[:1] for pid in descendants(ancestor)}
    found = [pid for pid, name in names.items() if "".join(name).endswith(("/gcs_server", "/raylet"))]
    assert len(found) >= 2
    return found


def no_secret_in(pids: Iterable[int], redis: RedisServer) -> None:
    for secret in (PREFIX_SECRET, CLUSTER_SECRET, redis.password):
        held = {pid: occurrences(pid, secret.encode()) for pid in pids}
        assert not any(held.values()), held


async def test_a_signal_leaves_nothing(cluster: Cluster) -> None:
    """The last of those that share a cluster: it ends it."""
    left = processes(cluster)
    folder = ray_folder(left)
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    # Ray makes its own folder writable for all; the folder around it keeps others out.
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "stderr").is_socket()
    cluster.process.terminate()
    assert await asyncio.to_thread(cluster.process.wait, 30) == 0
    assert not [pid for pid in left if is_running(pid)]
    assert not folder.exists()


def ray_folder(commands: dict[int, str]) -> Path:
    """The private folder of a cluster's own Ray."""
    (reaper,) = [command for command in commands.values() if "services.cluster.on_ray.ray_reaper" in command]
    return Path(reaper.split("services.cluster.on_ray.ray_reaper ")[1].split()[0])
