"""However `baton up` ends, nothing of it is left, and every waiting client gets an error with the reason."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.base.process_stat import is_running
from baton.v1.router_pb2 import GenerateRequest, TokenIds
from baton.v1.worker_pb2 import IntegrityReport
from tests.e2e.support.cluster import (
    MODEL,
    START_S,
    Cluster,
    baton_up,
    descendants,
    eventually,
    serves_again,
    starting_up,
)
from tests.e2e.support.completions import complete
from tests.support.reference import greedy_matches, load_reference

STOP_S = 30.0
PROMPT = list(range(3, 60))
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}

Send = Callable[[subprocess.Popen[str], int], None]


def to_parent(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)


def to_group(process: subprocess.Popen[str], number: int) -> None:
    os.killpg(process.pid, number)


def to_everyone(process: subprocess.Popen[str], number: int) -> None:
    """The parent and all below it, whatever group they are in, as a service manager does."""
    for pid in (process.pid, *descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):  # it may have ended with one before it
            os.kill(pid, number)


@pytest.fixture
def cluster(model: Path) -> Iterator[Cluster]:
    """One for each test; of one worker, where that is enough, since it starts sooner."""
    with baton_up(model, "--dtype", "float64", "--both", "1") as running:
        yield running


@pytest.fixture
def own_pair(model: Path) -> Iterator[Cluster]:
    """A worker of each role."""
    with baton_up(model, "--dtype", "float64") as running:
        yield running


def ends(process: subprocess.Popen[str], children: list[int], within_s: float) -> int:
    """Returns the exit code, once the process and all its children are gone in time."""
    code = process.wait(within_s)
    assert not [pid for pid in children if is_running(pid)]
    return code


SLOW = pytest.mark.slow
# Tokens of a stream that is let to end: on busy cores 500 took longer than the 20 s that a drain waits.
STREAMED = 250


@pytest.mark.parametrize(
    ("send", "number"),
    [
        pytest.param(to_parent, signal.SIGTERM, marks=SLOW),  # every test's cluster ends so
        pytest.param(to_parent, signal.SIGINT, marks=SLOW),
        pytest.param(to_group, signal.SIGTERM, marks=SLOW),
        pytest.param(to_group, signal.SIGINT, marks=SLOW),
        pytest.param(to_everyone, signal.SIGTERM, marks=SLOW),
        pytest.param(to_everyone, signal.SIGINT, marks=SLOW),
    ],
)
def test_while_idle(own_pair: Cluster, send: Send, number: int) -> None:
    children = descendants(own_pair.process.pid)
    assert len(children) == 7
    send(own_pair.process, number)
    assert ends(own_pair.process, children, STOP_S) == 0


@pytest.mark.parametrize(
    "children",
    [
        pytest.param(1, id="first-child"),
        pytest.param(4, id="front", marks=SLOW),
        pytest.param(5, id="engine", marks=SLOW),
    ],
)
@pytest.mark.parametrize("send", [pytest.param(to_parent, marks=SLOW), to_group])
async def test_while_starting(model: Path, send: Send, children: int) -> None:
    with starting_up(model, "--both", "1") as (process, _):
        await eventually(lambda: len(descendants(process.pid)) >= children, START_S)
        started = descendants(process.pid)
        send(process, signal.SIGINT if send is to_group else signal.SIGTERM)
        assert await asyncio.to_thread(ends, process, started, STOP_S) == 0


# Over fake children: tests/cli/up/test_command.py.
@pytest.mark.slow
async def test_a_second_signal_stops_at_once(cluster: Cluster) -> None:
    children = descendants(cluster.process.pid)
    async with cluster.stub() as stub:
        request = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=PROMPT), max_tokens=1900, **GREEDY)
        calls = [stub.Generate(request, timeout=60) for _ in range(16)]
        await all_decode(cluster, 16)
        cluster.process.send_signal(signal.SIGINT)
        await eventually(lambda: "draining" in cluster.log.read_text(), 5)
        assert all(is_running(pid) for pid in children), "it did not wait for its streams"
        cluster.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(ends, cluster.process, children, 2) == 0
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as cut:
                await _to_end(call)
            assert cut.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param("prefill-0", "engine_pid", marks=SLOW),
        ("decode-0", "front_pid"),
        pytest.param("prefill-0", "front_pid", marks=SLOW),
        pytest.param("decode-0", "engine_pid", marks=SLOW),
    ],
)
async def test_half_a_worker_takes_the_other_along_and_is_started_again(
    pair: Cluster, name: str, part: str
) -> None:
    logged = len(pair.log.read_text())
    async with pair.stub() as stub:
        report = (await reports_of_all(pair))[name]
        os.kill(getattr(report, part), signal.SIGKILL)
        await eventually(lambda: not (is_running(report.engine_pid) or is_running(report.front_pid)), 3)
        await serves_again(pair, stub, PROMPT, within_s=30)
        assert (await reports_of_all(pair))[name].front_pid != report.front_pid
    assert f"worker='{name}'" in next(
        line for line in pair.log.read_text()[logged:].splitlines() if "event='worker_exited'" in line
    )


async def reports_of_all(cluster: Cluster) -> dict[str, IntegrityReport]:
    """The reports once every address answers: the registry may list that of a killed worker for a while."""
    deadline = time.monotonic() + 20
    while any(worker.error for worker in await cluster.workers()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    return await cluster.reports()


# Over fake children: tests/cli/up/test_command.py; a process of ours whose parent dies: test_parent_death.py.
@pytest.mark.slow
async def test_a_killed_parent_takes_everyone_along(cluster: Cluster) -> None:
    children = descendants(cluster.process.pid)
    assert len(children) == 5
    cluster.process.kill()
    await eventually(lambda: not any(is_running(pid) for pid in children), 5)
    cluster.process.wait(5)  # its children may be gone before it is


async def test_running_streams_are_let_to_end(pair: Cluster, model: Path) -> None:
    """Though Ctrl-C reaches all of the group. The last of this folder: it ends the shared cluster."""
    children = descendants(pair.process.pid)
    decoded = await handoffs(pair)
    async with pair.stub() as stub, pair.http() as client:
        over_grpc = [
            asyncio.create_task(pair.generate(stub, PROMPT, max_tokens=STREAMED, **GREEDY)) for _ in range(2)
        ]
        over_http = [
            asyncio.create_task(complete(client, PROMPT, stream=stream, max_tokens=STREAMED, **GREEDY))
            for stream in (True, False)
        ]
        await all_decode(pair, decoded + 4)
        to_group(pair.process, signal.SIGINT)
        outputs = [(await answer).token_ids for answer in over_grpc]
        outputs += [(await completion).only.token_ids for completion in over_http]
    assert await asyncio.to_thread(ends, pair.process, children, STOP_S) == 0
    assert [len(output) for output in outputs] == [STREAMED] * 4
    assert outputs.count(outputs[0]) == 4
    greedy_matches(load_reference(model), PROMPT, outputs[0])


async def all_decode(cluster: Cluster, count: int) -> None:
    """Waits until that many sequences are past their handoff."""
    deadline = time.monotonic() + 10
    while await handoffs(cluster) < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def handoffs(cluster: Cluster) -> int:
    """The number of sequences whose handoff has ended."""
    return sum(report.handoffs_committed for report in (await cluster.reports()).values())


async def _to_end(call: Any) -> None:
    async for _ in call:
        pass
