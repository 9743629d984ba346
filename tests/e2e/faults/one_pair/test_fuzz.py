"""A hostile client sends what it likes for minutes, and the streams of others go on as before.

At full size the same client sends the same bytes at the same times to a server that discards them, in a
control run beside the same streams: what sending them costs the machine is not the cluster's fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from baton.v1.router_pb2 import GenerateRequest, TokenIds
from tests.e2e.faults.fuzzer import ACTIONS, Plan
from tests.e2e.support.cluster import MODEL, Cluster, assert_all_free, baton_up, descendants
from tests.e2e.support.ledger import resident_kib
from tests.e2e.support.proc import tcp_sockets
from tests.support.checkpoints import VOCAB_SIZE

# For the full size: a slot for each stream, and for whom the client asks.
# With tools in a format whose parameters get their types from schemas.
ROOMY = (
    "--tool-calls",
    "qwen3_coder",
    "--prefill",
    "1",
    "--decode",
    "1",
    "--dtype",
    "float32",
    "--slots",
    "32",
    "--block-tokens",
    "16",
)
# How many times the control run's ITL p99 is allowed; and how much a router's memory may grow.
MOST_SLOWER = 3.0
# The control lasts for this share of the attack: long enough for tens of thousands of gaps.
CONTROL_SHARE = 0.2
MOST_MIB = 200.0
# Where gaps are too few for a percentile: no stream is silent for longer, however slow the machine.
MOST_SILENT_S = 10.0
# Below this a p99 is the machine's own scheduling.
FLOOR_MS = 10.0
# For the client to end after its time: on a busy machine it is late itself.
_END_S = 300.0


@dataclass(frozen=True)
class Size:
    """Size of a run: seconds, rate and largest body of the client that misbehaves, and its timeout; number of
    streams beside it, and tokens of each; whether their gaps are enough of them to judge a percentile."""

    seconds: float
    every_s: float
    largest: int
    give_up_s: float
    streams: int
    tokens: int
    judges_gaps: bool


FULL = Size(
    seconds=float(os.environ.get("BATON_HOSTILE_S", "600")),
    every_s=0.25,
    largest=16 << 20,
    give_up_s=8.0,
    streams=16,
    tokens=100,
    judges_gaps=True,
)
REDUCED = Size(
    seconds=1.5, every_s=0.05, largest=1 << 20, give_up_s=1.5, streams=3, tokens=40, judges_gaps=False
)


@dataclass
class Streams:
    """Outputs and gaps that the well-behaved clients saw."""

    gaps_ms: list[float] = field(default_factory=list)
    ended: int = 0
    tokens: int = 0

    @property
    def p99_ms(self) -> float:
        return float(np.percentile(self.gaps_ms, 99)) if self.gaps_ms else float("nan")


async def stream(cluster: Cluster, number: int, tokens: int, seen: Streams, stop: asyncio.Event) -> None:
    """One client after the other, each a whole answer; any error fails the test."""
    async with cluster.stub() as stub:
        while not stop.is_set():
            prompt = [(number * 13 + seen.ended * 7 + place) % VOCAB_SIZE for place in range(32)]
            request = GenerateRequest(
                model=MODEL, token_ids=TokenIds(ids=prompt), max_tokens=tokens, temperature=0, ignore_eos=True
            )
            last, known = None, 0
            async for message in stub.Generate(request, timeout=120):
                now = time.monotonic()
                known += len(message.token_ids)
                if last is not None:
                    seen.gaps_ms.append(1e3 * (now - last))
                last = now
            assert known == tokens
            seen.ended += 1
            seen.tokens += known


@contextlib.asynccontextmanager
async def streams(cluster: Cluster, size: Size) -> AsyncIterator[Streams]:
    """`size.streams` of them, for as long as the block runs."""
    seen, stop = Streams(), asyncio.Event()
    async with asyncio.TaskGroup() as running:
        for number in range(size.streams):
            running.create_task(stream(cluster, number, size.tokens, seen, stop))
        yield seen
        stop.set()


async def attack(plan: Plan) -> dict[str, int]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.e2e.faults.fuzzer",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(plan.seconds + _END_S):
        output, _ = await process.communicate(plan.dump().encode())
    assert process.returncode == 0
    return dict(json.loads(output))


@contextlib.asynccontextmanager
async def discarding() -> AsyncIterator[int]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.e2e.support.discard", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield int(await process.stdout.readline())
    finally:
        process.terminate()
        await process.wait()


async def internal_ports(cluster: Cluster) -> tuple[int, ...]:
    """Every TCP port on which a worker process listens."""
    reports = (await cluster.reports()).values()
    pids = [pid for report in reports for pid in (report.front_pid, report.engine_pid)]
    return tuple(sorted({one.local_port for one in tcp_sockets(pids) if one.listens}))


async def prove(cluster: Cluster, size: Size) -> str:
    port = {
        name: int(address.rpartition(":")[2])
        for name, address in (("http", cluster.http_address), ("grpc", cluster.grpc_address))
    }
    internal = await internal_ports(cluster)
    assert internal
    paced = (MODEL, size.seconds, size.every_s, 41, size.largest, size.give_up_s)
    control = Streams()
    if size.judges_gaps:
        async with discarding() as sink, streams(cluster, size) as control:
            harmless = Plan(sink, sink, (sink,) * len(internal), *paced)
            await attack(replace(harmless, seconds=CONTROL_SHARE * size.seconds))
    router = router_pid(cluster)
    processes = await processes_of(cluster)
    before = resident_kib(router)
    async with streams(cluster, size) as beside:
        counts = await attack(Plan(port["http"], port["grpc"], internal, *paced))
    grown_mib = (resident_kib(router) - before) / 1024
    summary = (
        f"{sum(counts.values())} actions in {size.seconds:g} s, {beside.ended} answers beside them, "
        f"ITL p99 {beside.p99_ms:.1f} ms, without the client {control.p99_ms:.1f} ms; "
        f"router {grown_mib:+.0f} MiB; {counts}"
    )
    assert beside.ended >= size.streams
    if size.judges_gaps:
        assert beside.p99_ms <= MOST_SLOWER * max(control.p99_ms, FLOOR_MS), summary
    else:
        assert max(beside.gaps_ms) <= 1e3 * MOST_SILENT_S, summary
    assert grown_mib <= MOST_MIB, summary
    assert {action.__name__ for action in ACTIONS} <= {name.partition(":")[0] for name in counts}, summary
    assert "stranger: OK" not in counts, summary
    assert await processes_of(cluster) == processes, summary
    await assert_all_free(cluster, 15.0)
    return summary


async def processes_of(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """The processes that serve, by name; not those that compile grammars."""
    reports = await cluster.reports()
    found = {name: (report.front_pid, report.engine_pid) for name, report in reports.items()}
    router = router_pid(cluster)
    return {**found, "router": (router, router)}


def router_pid(cluster: Cluster) -> int:
    port = int(cluster.http_address.rpartition(":")[2])
    pids = descendants(cluster.process.pid)
    return next(one.pid for one in tcp_sockets(pids) if one.listens and one.local_port == port)


async def test_a_hostile_client_beside_streams(pair: Cluster) -> None:
    print(await prove(pair, REDUCED))


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_a_hostile_client_for_ten_minutes(model: Path) -> None:
    with baton_up(model, *ROOMY) as cluster:
        print(await prove(cluster, FULL))
