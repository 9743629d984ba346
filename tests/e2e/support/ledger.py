"""All that a cluster holds at one time, so that what it held before a test can be compared with after.

Three accounts: what workers and router hold for requests (empty where nothing runs), the descriptors and the
threads of every process. A process is known by its place in the cluster, so one that was started again is
compared with the one that it replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from baton.state.client.connect import MAX_CONNECTIONS
from baton.v1.admin_pb2 import AdminServiceGetStatusResponse, StoreStatus, WorkerState
from baton.v1.worker_pb2 import IntegrityReport
from tests.e2e.support.cluster import Cluster, descendants, leaks
from tests.e2e.support.proc import tcp_table

# Values of the router's /metrics that are 0 where no request runs.
_ROUTER_COUNTS = (
    "running_requests",
    "waiting_requests",
    "pending_cancels",
    "claimed_slots",
    "reserved_tokens",
    "queued_prefill_tokens",
    "journal_pending_requests",
)
# Pools of threads grow with the crowd they have met, to a bound of their own.
MORE_THREADS = 8
# A process keeps some idle connections to Redis, as many as it once needed at a time.
_SERVER = "valkey-server"
_TO_REDIS = "connection to Redis"


@dataclass(frozen=True, slots=True)
class ProcessAccount:
    """One process: descriptors by what they are, and its threads."""

    descriptors: Counter[str]
    threads: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """`held`: what is not free, in words; empty where all is. `processes`: by their place."""

    held: tuple[str, ...]
    processes: dict[str, ProcessAccount]

    def differences(self, before: Ledger) -> list[str]:
        """The differences between this ledger and `before`, whose own `held` was empty."""
        found = list(self.held)
        for name in sorted(self.processes.keys() | before.processes.keys()):
            now, then = self.processes.get(name), before.processes.get(name)
            if now is None or then is None:
                found.append(f"{name}: {'no such process before' if then is None else 'it is gone'}")
                continue
            more, fewer = now.descriptors - then.descriptors, then.descriptors - now.descriptors
            # Clients open connections as they need them, up to their bound; the server's are all of theirs.
            if name == _SERVER or more[_TO_REDIS] <= MAX_CONNECTIONS - then.descriptors[_TO_REDIS]:
                del more[_TO_REDIS], fewer[_TO_REDIS]
            # Before, a connection may not have been closed yet whose client had left.
            del fewer["socket"]
            if more or fewer:
                found.append(f"{name}: descriptors, {dict(more)} more, {dict(fewer)} fewer")
            if now.threads > then.threads + MORE_THREADS:
                found.append(f"{name}: {now.threads} threads instead of {then.threads}")
        return found


async def read_ledger(cluster: Cluster) -> Ledger:
    """Raises AssertionError or AioRpcError while a worker does not answer."""
    status = await cluster.status(check_integrity=True)
    assert all(not one.worker.error for one in status.workers), status.workers
    reports = {one.worker.identity.name: one.worker.report for one in status.workers}
    held = [
        *(f"{name}: {leak}" for name, report in reports.items() for leak in leaks(report)),
        *_not_ready(status),
        *_dead_links(status),
        *_journal(status.store),
        *await router_counters(cluster),
    ]
    redis_port = int(status.store.address.rpartition(":")[2])
    redis = {inode for inode, (local, remote, _) in tcp_table().items() if redis_port in (local, remote)}
    accounts = {name: process_account(pid, redis) for name, pid in processes(cluster, reports).items()}
    return Ledger(tuple(held), accounts)


async def quiesces(cluster: Cluster, before: Ledger | None, within_s: float) -> Ledger:
    """Waits until nothing is held and, where there is a `before`, all is as it was then."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            now = await read_ledger(cluster)
            found = now.differences(before or now)
            if not found:
                return now
        except (AssertionError, grpc.aio.AioRpcError, OSError) as error:
            found = [repr(error)]
        assert time.monotonic() < deadline, f"after {within_s} s: {found}"
        await asyncio.sleep(0.1)


def processes(cluster: Cluster, reports: dict[str, IntegrityReport]) -> dict[str, int]:
    """Every process of the cluster by its place: `decode-0 engine`, `services.router`, `valkey-server`, …"""
    places = {report.front_pid: f"{name} front" for name, report in reports.items()}
    places |= {report.engine_pid: f"{name} engine" for name, report in reports.items()}
    found: dict[str, int] = {}
    seen: Counter[str] = Counter()
    for pid in (cluster.process.pid, *descendants(cluster.process.pid)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            place = places.get(pid) or _program(pid)
            seen[place] += 1
            found[place if seen[place] == 1 else f"{place} {seen[place]}"] = pid
    return found


def resident_kib(pid: int) -> int:
    """Memory of a process that no file backs: what it has allocated and touched, shared memory included."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(map(int, re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)))


def _not_ready(status: AdminServiceGetStatusResponse) -> list[str]:
    return [
        f"{one.worker.identity.name}: {WorkerState.Name(one.state)}"
        for one in status.workers
        if one.state != WorkerState.WORKER_STATE_READY
    ]


def _dead_links(status: AdminServiceGetStatusResponse) -> list[str]:
    living = {one.worker.identity.incarnation for one in status.workers}
    return [
        f"{one.worker.identity.name}: a link to {link.peer.name}, which is dead"
        for one in status.workers
        for link in one.worker.report.links
        if link.peer.incarnation not in living
    ]


def _journal(store: StoreStatus) -> list[str]:
    if not store.HasField("journal_open"):
        return ["router: its journal does not answer"]
    return [f"router: {store.journal_open} open journal entries"] if store.journal_open else []


async def router_counters(cluster: Cluster) -> list[str]:
    """The router's gauges of running work that are not back at 0."""
    async with cluster.http() as client:
        text = (await client.get("/metrics")).text
    return [
        f"{sample.name} {sample.labels} is {sample.value:g}"
        for family in text_string_to_metric_families(text)
        if family.name.removeprefix("baton_router_") in _ROUTER_COUNTS
        for sample in family.samples
        if sample.value
    ]


def process_account(pid: int, redis: Collection[int] = ()) -> ProcessAccount:
    """Open descriptors and threads of a process. `redis`: inodes of sockets whose one end is Redis."""
    kinds: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            kind, _, inode = os.readlink(entry).partition(":[")
            kinds[_TO_REDIS if kind == "socket" and int(inode[:-1]) in redis else kind] += 1
    return ProcessAccount(kinds, len(list(Path(f"/proc/{pid}/task").iterdir())))


def _program(pid: int) -> str:
    """The module or the program, without interpreter, path and options."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    modules = [word for word in words if re.fullmatch(r"(baton|services)\.[\w.]+", word)]
    return modules[0] if modules else Path(words[0].split(" ")[0]).name
