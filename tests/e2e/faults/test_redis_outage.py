"""Redis frozen, killed, wiped, shared: no request notices, and afterwards everything is as it was."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from baton.base.errors import BatonError
from baton.base.process_stat import is_running
from baton.state import State
from services.common.processes.process_tree import descendants
from tests.e2e.operations.test_bad_commands import baton
from tests.e2e.support.cluster import (
    BATON,
    CLUSTER_SECRET,
    MODEL,
    STOP_S,
    Cluster,
    assert_all_free,
    baton_up,
    eventually,
)
from tests.e2e.support.redis_server import RedisServer, redis_server
from tests.state.opened import open_state
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.command_lines import command_line
from tests.support.reference import greedy_matches, load_reference

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
WHOLE_S = 3.0
WORKERS = ("decode-0", "prefill-0")
PROMPTS = [[(3 * number + 11 * salt) % VOCAB_SIZE for number in range(20 + 40 * salt)] for salt in range(3)]
LENGTHS = (30, 90, 180)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=5)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def cluster(model: Path, redis: RedisServer) -> Iterator[Cluster]:
    """Workers that write whatever they have to say to their log."""
    config = f"state: {{redis_url: '{redis.url}'}}\nprefill: 1\ndecode: 1\nlog_level: debug\n"
    with baton_up(model, "--dtype", "float64", config=config) as running:
        yield running


@pytest.fixture(scope="module")
def truth(model: Path, cluster: Cluster) -> list[list[int]]:
    """The longest output of each prompt by the reference."""

    async def ask() -> list[list[int]]:
        async with cluster.stub() as stub:
            asked = (cluster.generate(stub, one, max_tokens=max(LENGTHS), **GREEDY) for one in PROMPTS)
            return [answer.token_ids for answer in await asyncio.gather(*asked)]

    outputs, reference = asyncio.run(ask()), load_reference(model)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        greedy_matches(reference, prompt, output)
    return outputs


@dataclass
class Load:
    """Clients who ask one thing after another until stopped, each after a pause; every token is checked."""

    cluster: Cluster
    stub: RouterServiceAsyncStub
    truth: list[list[int]]
    pause_s: float
    spans: list[tuple[float, float]] = field(default_factory=list)
    running: int = 0
    stopping: bool = False

    async def client(self, number: int) -> None:
        turn = number
        while not self.stopping:
            which, length = turn % len(PROMPTS), LENGTHS[turn // 2 % len(LENGTHS)]
            began = time.monotonic()
            self.running += 1
            answer = await self.cluster.generate(self.stub, PROMPTS[which], max_tokens=length, **GREEDY)
            self.running -= 1
            assert answer.token_ids == self.truth[which][:length]
            self.spans.append((began, time.monotonic()))
            await asyncio.sleep(self.pause_s)
            turn += 1

    async def until_some_run(self) -> None:
        await eventually(lambda: self.running > 0, 20)

    def within(self, begin: float, end: float) -> int:
        """Requests that came and were answered between these times."""
        return sum(begin < one and other < end for one, other in self.spans)

    def across(self, at: float) -> int:
        """Requests that ran at this time."""
        return sum(one < at < other for one, other in self.spans)


@contextlib.asynccontextmanager
async def under_load(
    cluster: Cluster, truth: list[list[int]], clients: int = 4, pause_s: float = 0.0
) -> AsyncIterator[Load]:
    """Raises what a client met, at the end."""
    async with cluster.stub() as stub:
        load = Load(cluster, stub, truth, pause_s)
        running = [asyncio.create_task(load.client(number)) for number in range(clients)]
        try:
            yield load
        finally:
            load.stopping = True
            await asyncio.gather(*running)


@contextlib.asynccontextmanager
async def state_of(cluster: Cluster, redis: RedisServer) -> AsyncIterator[State]:
    """The cluster's state in Redis, read without the cluster."""
    namespace = (await cluster.status()).store.namespace
    state = await open_state(redis.url, namespace=namespace)
    try:
        yield state
    finally:
        await state.close()


async def registered(state: State) -> list[str]:
    """The workers that the store itself lists, without the cluster's id; none while it is away."""
    try:
        entries = (await state.registry.listing()).entries
    except BatonError:
        return []
    return sorted(entry.member.name.rpartition(".")[2] for entry in entries)


async def until_registered(state: State, names: tuple[str, ...], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while (found := await registered(state)) != sorted(names):
        assert time.monotonic() < deadline, f"{found} after {within_s} s"
        await asyncio.sleep(0.05)


async def figure(address: str, name: str) -> float:
    """A metric that has one value."""
    async with httpx.AsyncClient(verify=False) as client:
        text = (await client.get(f"http://{address}/metrics")).text
    return float(next(line for line in text.splitlines() if line.startswith(f"{name}{{")).split()[-1])


async def until_redis_is_unreachable(cluster: Cluster) -> None:
    """Waits until the router and every worker know that it is away."""
    deadline = time.monotonic() + 5.0
    while True:
        status = await cluster.status()
        seen = [await figure(worker.metrics_address, "baton_worker_registered") for worker in status.workers]
        if status.store.HasField("unavailable_s") and seen == [0.0] * len(WORKERS):
            return
        assert time.monotonic() < deadline, (status.store, seen)
        await asyncio.sleep(0.1)


async def quiet(cluster: Cluster, state: State) -> None:
    """Accounting: nothing is held, and the journal is empty and owed nothing."""
    await assert_all_free(cluster, 5)
    deadline = time.monotonic() + 5.0
    while True:
        store = (await cluster.status()).store
        if store.HasField("journal_open") and not (store.journal_open or store.journal_pending):
            break
        assert time.monotonic() < deadline, store
        await asyncio.sleep(0.1)
    assert store.journal_dropped == 0
    assert not store.HasField("unavailable_s")
    assert store.registered_workers == len(WORKERS)
    assert await state.journal.count_open() == 0


def no_secret_shown(cluster: Cluster, secret: str) -> None:
    """Neither a process list nor a log has it."""
    for pid in (cluster.process.pid, *descendants(cluster.process.pid)):
        assert secret not in " ".join(command_line(pid))
    assert secret not in cluster.log.read_text()


@pytest.mark.parametrize(
    ("fault", "away_s"),
    [
        ("frozen", 6.0),
        pytest.param("wiped", 0.0, marks=pytest.mark.slow),
        pytest.param("frozen", 30.0, marks=pytest.mark.slow),
        pytest.param("wiped", 30.0, marks=pytest.mark.slow),
    ],
)
async def test_no_request_notices(
    cluster: Cluster, redis: RedisServer, truth: list[list[int]], fault: str, away_s: float
) -> None:
    """Redis is away for `away_s`, and until all know it and a request has come and been served meanwhile."""
    async with state_of(cluster, redis) as state:
        await until_registered(state, WORKERS, WHOLE_S)
        async with under_load(cluster, truth, clients=2, pause_s=1.5) as load:
            await asyncio.sleep(1.0)
            await load.until_some_run()
            gone = time.monotonic()
            redis.freeze() if fault == "frozen" else redis.kill()
            await until_redis_is_unreachable(cluster)
            await asyncio.sleep(max(0.0, gone + away_s - time.monotonic()))
            await eventually(lambda: load.within(gone, time.monotonic()) > 0, 20)
            assert len((await cluster.status()).workers) == len(WORKERS), (
                "an absent registry removes no worker"
            )
            await load.until_some_run()
            back = time.monotonic()
            redis.thaw() if fault == "frozen" else await asyncio.to_thread(redis.start)
            await until_registered(state, WORKERS, WHOLE_S)
            await asyncio.sleep(1.0)
        assert load.across(gone) > 0, "requests ran when it went"
        assert load.across(back) > 0, "requests ran when it came back"
        await quiet(cluster, state)
    no_secret_shown(cluster, redis.password)
    log = cluster.log.read_text()
    assert "redis_unavailable" in log
    assert "redis_available" in log
    assert "attempt_failed" not in log


@pytest.mark.slow
async def test_two_clusters_on_one_redis_do_not_meet(
    cluster: Cluster, redis: RedisServer, model: Path, truth: list[list[int]]
) -> None:
    flags = ("--dtype", "float64", "--both", "1")
    with baton_up(model, *flags, config=f"state: {{redis_url: '{redis.url}'}}") as second:
        async with (
            cluster.stub() as ours,
            second.stub() as theirs,
            state_of(cluster, redis) as our_state,
            state_of(second, redis) as their_state,
        ):
            await until_registered(our_state, WORKERS, WHOLE_S)
            await until_registered(their_state, ("both-0",), WHOLE_S)
            await asyncio.sleep(1.0)  # both routers look twice
            assert sorted(await cluster.reports()) == sorted(WORKERS)
            assert sorted(await second.reports()) == ["both-0"]
            for one, stub in ((cluster, ours), (second, theirs)):
                await until_resumable(one, stub, truth)
            second.process.terminate()
            assert await asyncio.to_thread(second.process.wait, STOP_S) == 0
            assert await registered(their_state) == [], "who leaves in order takes its entry along"
            assert await registered(our_state) == sorted(WORKERS)


@contextlib.contextmanager
def joining_worker(
    model: Path, redis: RedisServer, namespace: str, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """`baton worker` by itself: without a supervisor, found in the registry alone."""
    command = [*BATON, "worker", "--role", "both", "--model", str(model), "--name", "guest"]
    command += ["--dtype", "float64", "--served-model-name", MODEL, "--redis-namespace", namespace]
    environment = {
        **os.environ,
        "BATON_REDIS_URL": redis.url,
        "BATON_CLUSTER_SECRET": CLUSTER_SECRET,
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
async def test_a_worker_without_a_supervisor_is_found_and_serves(
    cluster: Cluster,
    redis: RedisServer,
    model: Path,
    truth: list[list[int]],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    async with cluster.stub() as stub, state_of(cluster, redis) as state:
        log = tmp_path / "log"
        with joining_worker(model, redis, (await cluster.status()).store.namespace, log) as guest:
            await until_registered(state, (*WORKERS, "guest"), 60)
            async with under_load(cluster, truth, clients=12):
                await until_it_decodes(cluster, stub, "guest", 20)
                left = [guest.pid, *descendants(guest.pid)]
                assert redis.password not in " ".join(command_line(guest.pid))
                if number is signal.SIGTERM:
                    guest.terminate()  # what runs there ends well
            if number is signal.SIGKILL:
                guest.kill()
            assert await asyncio.to_thread(guest.wait, STOP_S) == (0 if number is signal.SIGTERM else -number)
            await eventually(lambda: not any(is_running(pid) for pid in left), 5)
            await until_registered(state, WORKERS, 8)  # a killed one's lease lapses
            await until_watched(cluster, len(WORKERS), 5)
        assert redis.password not in log.read_text()
        await quiet(cluster, state)


async def until_it_decodes(
    cluster: Cluster, stub: RouterServiceAsyncStub, name: str, within_s: float
) -> None:
    """Waits until a request was prefilled and decoded by this worker."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(AssertionError):  # one of them does not answer yet
            reports = await cluster.reports()
            if name in reports and reports[name].handoffs_local:
                assert sorted(reports) == sorted((*WORKERS, name))
                return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def until_resumable(cluster: Cluster, stub: RouterServiceAsyncStub, truth: list[list[int]]) -> None:
    """Requests until the journal has one before it ends: no request waits for that."""
    resumable = False
    async with asyncio.timeout(WHOLE_S):
        while not resumable:
            answer = await cluster.generate(stub, PROMPTS[0], max_tokens=30, **GREEDY)
            assert answer.token_ids == truth[0][:30]
            assert answer.last is not None
            resumable = answer.last.resumable


async def until_watched(cluster: Cluster, count: int, within_s: float) -> None:
    """Waits until the router watches `count` workers."""
    deadline = time.monotonic() + within_s
    while (found := len((await cluster.status()).workers)) != count:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_its_own_redis_is_brought_back_and_filled_again(model: Path) -> None:
    with baton_up(model, "--dtype", "float64", "--both", "1") as cluster:
        async with cluster.stub() as stub:
            first = own_redis(cluster)
            os.kill(first, signal.SIGKILL)
            answer = await cluster.generate(stub, PROMPTS[0], max_tokens=200, **GREEDY)
            assert len(answer.token_ids) == 200
            deadline = time.monotonic() + 5
            while True:
                store = (await cluster.status()).store
                if store.restarts == 1 and store.registered_workers == 1 and store.HasField("journal_open"):
                    break
                assert time.monotonic() < deadline, store
                await asyncio.sleep(0.1)
            assert store.embedded
            assert await figure(cluster.http_address, "baton_router_redis_restarts_total") == 1
            left = descendants(cluster.process.pid)
            assert own_redis(cluster) in left
            cluster.process.kill()
            await eventually(lambda: not any(is_running(pid) for pid in left), 5)


def own_redis(cluster: Cluster) -> int:
    """The process of the embedded server."""
    (pid,) = [pid for pid in descendants(cluster.process.pid) if "valkey" in " ".join(command_line(pid))]
    return pid


def wrong_url(redis: RedisServer) -> str:
    return redis.url.replace(redis.password, "a-word-that-is-wrong")


@pytest.mark.slow
def test_a_refused_password_is_one_line_of_a_cluster(
    model: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_SECRET", CLUSTER_SECRET)
    wrong = wrong_url(redis)
    ports = ("--http-port", "0", "--grpc-port", "0", "--ray-address", "none")
    code, out, err = baton("up", "--both", "1", "--model", str(model), *ports, "--redis-url", wrong)
    assert (code, out) == (2, ""), err
    last = err.splitlines()[-2:]
    assert any(line.endswith("refused the user name or password") for line in last), err
    assert "Traceback" not in err
    assert "a-word-that-is-wrong" not in err


def test_a_refused_password_is_one_line_of_a_worker(
    model: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_SECRET", CLUSTER_SECRET)
    wrong = wrong_url(redis)
    joins = ("--redis-url", wrong, "--redis-namespace", "ours")
    code, out, err = baton("worker", "--role", "both", "--model", str(model), *joins)
    assert code == 2, err
    error = json.loads(out.splitlines()[-1])["error"]
    assert error["kind"] == "unauthenticated"
    assert error["message"].endswith("refused the user name or password")
    assert "a-word-that-is-wrong" not in out + err
