"""Workers and a router started one by one, as another supervisor would: one may die alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import grpc
import grpc.aio

from baton.base.parent_death import tied
from baton.v1.admin_pb2 import AdminServiceGetStatusRequest, WorkerState
from baton.v1.admin_pb2_grpc import AdminServiceStub
from baton.v1.worker_pb2 import GetAuditRequest, IntegrityReport
from baton.v1.worker_pb2_grpc import WorkerServiceStub
from services.common.config.router import RouterConfig
from services.common.config.types import Role, StrictModel
from services.common.config.worker import WorkerConfig
from tests.e2e.support.cluster import CLUSTER_SECRET, MODEL, START_S, STOP_S, Cluster, worker_channel
from tests.e2e.support.wire_proxy import WireProxy, wire_proxies

ENDS_S = 10.0
WORKER = (sys.executable, "-m", "services.worker")
ROUTER = (sys.executable, "-m", "services.router")


@dataclass(slots=True)
class Worker:
    """A worker that runs in processes of its own."""

    name: str
    front: subprocess.Popen[str]
    address: str
    # What the router's connections to it pass through, where a test wants that.
    proxy: WireProxy | None = None

    async def report(self) -> IntegrityReport:
        """The integrity report from the worker itself, not by way of the router."""
        async with worker_channel(self.address) as channel:
            return (await WorkerServiceStub(channel).GetAudit(GetAuditRequest(), timeout=5)).report

    async def until(self, what: Callable[[IntegrityReport], bool], within_s: float = 10.0) -> IntegrityReport:
        """Waits until its report is so."""
        deadline = time.monotonic() + within_s
        while not what(report := await self.report()):
            assert time.monotonic() < deadline, f"{self.name}: {report}"
            await asyncio.sleep(0.01)
        return report


@dataclass(slots=True)
class Loose:
    """A router's listeners and its workers by name. `restart` starts one again that has ended; where it is
    proxied, the router reaches it at the same address."""

    cluster: Cluster
    workers: dict[str, Worker]
    restart: Callable[[str], Awaitable[None]]


@contextlib.contextmanager
def loose_workers(
    model: Path,
    *roles: Role,
    proxied: bool = False,
    worker_program: Sequence[str] = WORKER,
    router_program: Sequence[str] = ROUTER,
    each: Mapping[str, dict[str, Any]] | None = None,
    **sections: dict[str, Any],
) -> Iterator[Loose]:
    """One worker a role named, and a router. `sections` are the workers' `engine` and `transfer` settings,
    and the `router`'s; `each` has what is different for the worker of that name. Those still alive are
    stopped at the end, and must end well. `proxied`: the router reaches each worker through a `WireProxy`."""
    with contextlib.ExitStack() as stack:
        proxy_to = stack.enter_context(wire_proxies())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = folder / "log"
        stderr = stack.enter_context(log.open("w"))

        def start(program: Sequence[str], config: StrictModel) -> subprocess.Popen[str]:
            process = start_program(program, config, stderr)
            stack.callback(stop_program, process, log)
            return process

        router = sections.pop("router", {})
        fronts = {}
        configs = {}
        for index, role in enumerate(roles):
            name = f"{role}-{roles[:index].count(role)}"
            config = {
                "name": name,
                "role": role,
                "model": str(model),
                "served_model_name": MODEL,
                "cluster_secret": CLUSTER_SECRET,
                **sections,
                **(each or {}).get(name, {}),
            }
            configs[name] = WorkerConfig.model_validate(config)
            fronts[name] = start(worker_program, configs[name])

        async def restart(name: str) -> None:
            worker = workers[name]
            assert worker.front.stdout is not None
            worker.front.stdout.close()
            # Not in another thread, with whose end it would be killed.
            worker.front = start(worker_program, configs[name])
            worker.address = (await asyncio.to_thread(ready_line_of, worker.front, log))["grpc"]
            if worker.proxy is not None:
                worker.proxy.retarget(worker.address)

        workers = {
            name: Worker(name, front, ready_line_of(front, log)["grpc"]) for name, front in fronts.items()
        }
        if proxied:
            for worker in workers.values():
                worker.proxy = proxy_to(worker.address)
        settings = {"http_port": 0, "grpc_port": 0, "model": str(model), "served_model_name": MODEL, **router}
        settings = {"cluster_secret": CLUSTER_SECRET, **settings}
        addresses = tuple(
            worker.proxy.address if worker.proxy else worker.address for worker in workers.values()
        )
        process = start(router_program, RouterConfig.model_validate({**settings, "workers": addresses}))
        ready_line = ready_line_of(process, log)
        _all_found(ready_line["admin"])
        yield Loose(
            Cluster(process, ready_line["grpc"], ready_line["http"], ready_line["admin"], log),
            workers,
            restart,
        )


async def all_started_again(loose: Loose) -> None:
    """Starts the workers again that have ended, which must be proxied, and waits until the router takes all
    for ready."""
    ended = [name for name, worker in loose.workers.items() if worker.front.poll() is not None]
    await asyncio.gather(*map(loose.restart, ended))
    deadline = time.monotonic() + START_S
    while True:
        status = await loose.cluster.status()
        states = {one.worker.identity.name: one.state for one in status.workers if not one.worker.error}
        ready = [name for name, state in states.items() if state == WorkerState.WORKER_STATE_READY]
        if set(ready) == set(loose.workers):
            return
        assert time.monotonic() < deadline, f"only {ready} are ready after {START_S} s"
        await asyncio.sleep(0.05)


@contextlib.contextmanager
def lone_worker(model: Path, role: Role, **sections: dict[str, Any]) -> Iterator[Worker]:
    """A worker without a supervisor, that no router knows; `sections` as above. Stopped at the end."""
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        stderr = stack.enter_context(log.open("w"))
        config = {
            "name": f"{role}-0",
            "role": role,
            "model": str(model),
            "cluster_secret": CLUSTER_SECRET,
            **sections,
        }
        front = start_program(WORKER, WorkerConfig.model_validate(config), stderr)
        stack.callback(stop_program, front, log)
        yield Worker(f"{role}-0", front, ready_line_of(front, log)["grpc"])


def start_program(program: Sequence[str], config: StrictModel, stderr: IO[str]) -> subprocess.Popen[str]:
    """Starts it with its configuration on stdin."""
    process = subprocess.Popen(
        tied(program),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    process.stdin.write(config.model_dump_json())
    process.stdin.close()
    return process


def ready_line_of(process: subprocess.Popen[str], log: Path) -> dict[str, str]:
    """Waits for its line on stdout: the addresses where it listens."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        line = process.stdout.readline() if selector.select(START_S) else ""
    assert line, f"not ready, exit code {process.poll()}\n{log.read_text()[-4000:]}"
    return dict(json.loads(line)["ready"])


_FOUND = (WorkerState.WORKER_STATE_READY, WorkerState.WORKER_STATE_OTHER_POOL)


def _all_found(admin: str) -> None:
    """A router is ready when some pair serves; a test that counts on every worker waits for every one."""
    deadline = time.monotonic() + START_S
    with grpc.insecure_channel(admin) as channel:
        while True:
            status = AdminServiceStub(channel).GetStatus(AdminServiceGetStatusRequest(), timeout=10)
            if all(worker.state in _FOUND for worker in status.workers):
                return
            assert time.monotonic() < deadline, status
            time.sleep(0.02)


def stop_program(process: subprocess.Popen[str], log: Path) -> None:
    """Stops it with SIGTERM; it must end well. One that has ended is left as it is."""
    assert process.stdout is not None
    if process.poll() is not None:
        process.stdout.close()  # a test killed it, or its other half, and may have started it again
        return
    with process.stdout:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(ENDS_S)
            raise
        assert code == 0, log.read_text()[-4000:]
