"""`baton worker group` behind a router: probes, a killed worker, a drain."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import httpx
import pytest

from baton.base.addresses import split_address
from baton.state import Member, State
from baton.state.embedded import free_port
from models.demo_training.evaluate import DEMO_MODEL
from services.common.config.router import RouterConfig
from services.common.processes.process_tree import descendants
from tests.e2e.support.cluster import CLUSTER_SECRET, MODEL, START_S, STOP_S, Answer, Cluster
from tests.e2e.support.prometheus_names import group_page, series_of
from tests.e2e.support.redis_server import RedisServer, redis_server
from tests.e2e.support.workers import ROUTER, ready_line_of, start_program, stop_program

if TYPE_CHECKING:  # the class is in the stub file only
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

BATON = (sys.executable, "-m", "services.cli.main")
NAMESPACE = "group-test"
DRAIN_S = 60.0
# Of workers that compile their kernels.
_GPU_START_S = 180.0
PROMPT = [(number * 7) % 50 + 1 for number in range(40)]


class Group:
    """A running `baton worker group`, its probes, and the log of it and of its router."""

    def __init__(self, process: subprocess.Popen[str], probes: str, log: Path) -> None:
        self.process = process
        self.probes = probes
        self.log = log

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=5, verify=False) as client:
            return await client.get(f"http://{self.probes}{path}")

    async def until(self, path: str, code: int, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = await self.get(path)
                if answer.status_code == code:
                    return
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            await asyncio.sleep(0.05)

    async def restarts(self) -> float:
        """Number of restarts of all its workers."""
        lines = (await self.get("/metrics")).text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith("baton_group_worker_restarts")
        )


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def write_config(folder: Path, model: Path, redis: RedisServer, port: int, **more: Any) -> Path:
    (folder / "cluster-secret").write_text(f"{CLUSTER_SECRET}\n")
    (folder / "redis-url").write_text(f"{redis.url}\n")
    settings = {
        "model": str(model),
        "served_model_name": MODEL,
        "cluster_secret_file": str(folder / "cluster-secret"),
        "state": {"namespace": NAMESPACE, "redis_url_file": str(folder / "redis-url")},
        "worker": {"admin_http_port": port},
        "engine": {"device": "cpu", "dtype": "float64"},
        "drain_s": DRAIN_S,
        **more,
    }
    path = folder / "workers.yaml"
    path.write_text(json.dumps(settings))
    return path


@contextlib.contextmanager
def started(command: list[str], stderr: IO[str]) -> Iterator[subprocess.Popen[str]]:
    place = {"BATON_NAME": "pod-7", "BATON_HOST": "127.0.0.1", "BATON_LISTEN_HOST": "::"}
    environment = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*BATON, *command], stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait(STOP_S)
        process.stdout.close()


@pytest.fixture
def group(model: Path, redis: RedisServer, log: Path, tmp_path: Path) -> Iterator[Group]:
    port = free_port()
    config = write_config(tmp_path, model, redis, port, transfer={"transport": "ipc"})
    command = ["worker", "group", "--prefill", "1", "--decode", "1", "--config", str(config)]
    with log.open("a") as stderr, started(command, stderr) as process:
        yield Group(process, f"127.0.0.1:{port}", log)


@pytest.fixture
def cluster(model: Path, redis: RedisServer, log: Path) -> Iterator[Cluster]:
    """A cluster of the router alone."""
    with router(model, redis, log) as running:
        yield running


@contextlib.contextmanager
def router(model: Path, redis: RedisServer, log: Path) -> Iterator[Cluster]:
    """A router that finds its workers in Redis."""
    config = RouterConfig.model_validate(
        {
            "http_port": 0,
            "grpc_port": 0,
            "admin_http_port": 0,
            "admin_grpc_port": 0,
            "model": str(model),
            "served_model_name": MODEL,
            "state": {"redis_url": redis.url, "namespace": NAMESPACE},
            "cluster_secret": CLUSTER_SECRET,
            "queue_timeout_s": 60,
        }
    )
    with log.open("a") as stderr:
        process = start_program(ROUTER, config, stderr)
        try:
            ready_line = ready_line_of(process, log)
            yield Cluster(process, ready_line["grpc"], ready_line["http"], ready_line["admin"], log)
        finally:
            stop_program(process, log)


@contextlib.asynccontextmanager
async def registry(redis: RedisServer) -> AsyncIterator[State]:
    state = State.at(redis.url, namespace=NAMESPACE)
    try:
        yield state
    finally:
        await state.close()


async def workers_in(state: State) -> list[Member]:
    entries = (await state.registry.listing()).entries
    return sorted((one.member for one in entries if one.member.role != "router"), key=lambda one: one.name)


async def test_a_group_serves_restarts_its_workers_and_drains(
    group: Group, cluster: Cluster, redis: RedisServer
) -> None:
    await group.until("/health", 200, START_S)
    await group.until("/ready", 200, 10)
    async with registry(redis) as state, cluster.stub() as stub:
        members = await workers_in(state)
        assert [(one.name, one.group) for one in members] == [
            ("pod-7-decode-0", "pod-7"),
            ("pod-7-prefill-0", "pod-7"),
        ]
        registered = [one.addresses[kind] for one in members for kind in ("grpc", "metrics")]
        ports = {split_address(address)[1] for address in (group.probes, *registered)}
        assert len(ports) == 5
        assert {split_address(address)[0] for address in registered} == {"127.0.0.1"}
        for host, listening in itertools.product(("127.0.0.1", "::1"), ports):
            socket.create_connection((host, listening), timeout=5).close()
        assert_no_secret_in_arguments(group, redis)
        asked = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        first = await cluster.generate(stub, PROMPT, **asked)

        reports = await cluster.reports()
        os.kill(reports["pod-7-prefill-0"].engine_pid, signal.SIGKILL)
        await group.until("/ready", 503, 10)
        again = await cluster.generate(stub, PROMPT, **asked)
        assert again.token_ids == first.token_ids
        await group.until("/ready", 200, 30)
        assert await group.restarts() == 1
        assert (await group.get("/health")).status_code == 200
        assert series_of((await group.get("/metrics")).text) == series_of(group_page())

        left = [group.process.pid, *descendants(group.process.pid)]
        running = await begun(cluster, stub, **asked | {"max_tokens": 300})
        began = time.monotonic()
        group.process.terminate()
        await group.until("/ready", 503, 2)
        assert (await group.get("/health")).status_code == 200
        async with asyncio.timeout(5):  # each worker writes it by itself
            while not all(one.draining for one in await workers_in(state)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert len((await running).token_ids) == 300, "it was finished"
        assert await asyncio.to_thread(group.process.wait, DRAIN_S) == 0
        assert time.monotonic() - began < DRAIN_S
        assert await workers_in(state) == []
    assert alive(left) == []
    assert_no_secret_in_log(group, redis)


async def begun(cluster: Cluster, stub: RouterServiceAsyncStub, **fields: Any) -> asyncio.Task[Answer]:
    """A request that has its slot on the decode worker."""
    running = asyncio.create_task(cluster.generate(stub, PROMPT, **fields))
    deadline = time.monotonic() + START_S
    while (load := (await cluster.reports())["pod-7-decode-0"].load).free_slots == load.slots:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    return running


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def last_line(log: Path) -> str:
    return log.read_text().splitlines()[-1]


def assert_no_secret_in_log(group: Group, redis: RedisServer) -> None:
    text = group.log.read_text()
    assert CLUSTER_SECRET not in text
    assert redis.password not in text


def assert_no_secret_in_arguments(group: Group, redis: RedisServer) -> None:
    for pid in (group.process.pid, *descendants(group.process.pid)):
        arguments = Path(f"/proc/{pid}/cmdline").read_text()
        assert CLUSTER_SECRET not in arguments
        assert redis.password not in arguments


@pytest.mark.slow
async def test_a_worker_from_a_file_ends_with_the_code_of_its_failure(
    model: Path, redis: RedisServer, log: Path, tmp_path: Path
) -> None:
    """1 where its engine hangs; until then its probes follow its life."""
    port = free_port()
    config = write_config(tmp_path, model, redis, port)
    command = ["worker", "--role", "both", "--config", str(config)]
    with log.open("a") as stderr, started(command, stderr) as process:
        worker = Group(process, f"127.0.0.1:{port}", log)
        await worker.until("/ready", 200, START_S)
        assert "baton_worker_ready" in (await worker.get("/metrics")).text
        (engine,) = descendants(process.pid)
        os.kill(engine, signal.SIGSTOP)
        assert await asyncio.to_thread(process.wait, STOP_S) == 1
    last = last_line(log)
    assert last.startswith("baton: error: the engine made no progress for")


@pytest.mark.slow
async def test_a_second_signal_ends_a_group_at_once(group: Group, cluster: Cluster) -> None:
    await group.until("/ready", 200, START_S)
    left = [group.process.pid, *descendants(group.process.pid)]
    async with cluster.stub() as stub:
        running = await begun(cluster, stub, max_tokens=2000, temperature=0)
        group.process.terminate()
        await group.until("/ready", 503, 2)
        group.process.terminate()
        assert await asyncio.to_thread(group.process.wait, 2) == 130
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    deadline = time.monotonic() + 2
    while alive(left):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.multigpu
@pytest.mark.timeout(600)
async def test_a_group_on_two_gpus(redis: RedisServer, log: Path, tmp_path: Path) -> None:
    """Each worker has the GPU of its place and KV goes from GPU to GPU, after a lost engine too."""
    port = free_port()
    engine = {"device": "cuda", "numerics": "exact"}
    config = write_config(tmp_path, DEMO_MODEL, redis, port, engine=engine)
    command = ["worker", "group", "--prefill", "1", "--decode", "1", "--config", str(config)]
    asked = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
    with (
        log.open("a") as stderr,
        started(command, stderr) as process,
        router(DEMO_MODEL, redis, log) as cluster,
    ):
        group = Group(process, f"127.0.0.1:{port}", log)
        await group.until("/ready", 200, _GPU_START_S)
        async with cluster.stub() as stub:
            first = await cluster.generate(stub, PROMPT, **asked)
            await assert_gpu_to_gpu(cluster)
            for name in ("pod-7-prefill-0", "pod-7-decode-0"):
                os.kill((await cluster.reports())[name].engine_pid, signal.SIGKILL)
                await group.until("/ready", 503, 10)
                await group.until("/ready", 200, _GPU_START_S)
                again = await cluster.generate(stub, PROMPT, **asked)
                assert again.token_ids == first.token_ids, name
                await assert_gpu_to_gpu(cluster)
            assert await group.restarts() == 2
        left = [process.pid, *descendants(process.pid)]
        process.terminate()
        assert await asyncio.to_thread(process.wait, DRAIN_S) == 0
    assert alive(left) == []


async def assert_gpu_to_gpu(cluster: Cluster) -> None:
    """Prefill is on the first GPU, decode on the second, and their link is what `auto` prefers."""
    reports = await cluster.reports()
    assert {name: report.device for name, report in reports.items()} == {
        "pod-7-prefill-0": "cuda:0",
        "pod-7-decode-0": "cuda:1",
    }
    links = [link.transport for report in reports.values() for link in report.links]
    assert links
    assert set(links) == {"ipc"}
    assert [report.link_fallbacks for report in reports.values()] == [0, 0]
