"""Workers and a router started one by one, as a supervisor of somebody else's would: one may die alone."""

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import grpc
import grpc.aio

from baton.v1.router_pb2 import GetStatusRequest, WorkerState
from baton.v1.router_pb2_grpc import RouterServiceStub
from baton.v1.worker_pb2 import Audit, GetAuditRequest
from baton.v1.worker_pb2_grpc import WorkerServiceStub
from services.common.config import Role, RouterConfig, StrictModel, WorkerConfig
from tests.e2e.cluster import MODEL, START_S, STOP_S, Cluster

ENDS_S = 10.0


@dataclass(slots=True)
class Worker:
    """A running worker."""

    name: str
    front: subprocess.Popen[str]
    address: str

    async def audit(self) -> Audit:
        """Its own word, past the router."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            return (await WorkerServiceStub(channel).GetAudit(GetAuditRequest(), timeout=5)).audit

    async def until(self, what: Callable[[Audit], bool], within_s: float = 10.0) -> Audit:
        """Waits until its audit is so."""
        deadline = time.monotonic() + within_s
        while not what(audit := await self.audit()):
            assert time.monotonic() < deadline, f"{self.name}: {audit}"
            await asyncio.sleep(0.01)
        return audit


@dataclass(slots=True)
class Loose:
    """A router's doors and its workers by name."""

    cluster: Cluster
    workers: dict[str, Worker]


@contextlib.contextmanager
def loose_workers(model: Path, *roles: Role, **sections: dict[str, Any]) -> Iterator[Loose]:
    """One worker a role named, and a router. `sections` are the workers' `engine` and `transfer` settings,
    and the `router`'s. Those still alive are stopped at the end, and must end well."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = folder / "log"
        stderr = stack.enter_context(log.open("w"))

        def start(module: str, config: StrictModel) -> subprocess.Popen[str]:
            process = _start(module, config, stderr)
            stack.callback(_stop, process, log)
            return process

        router = sections.pop("router", {})
        fronts = {}
        for index, role in enumerate(roles):
            name = f"{role}-{roles[:index].count(role)}"
            config = {"name": name, "role": role, "model": str(model), **sections}
            fronts[name] = start("services.worker", WorkerConfig.model_validate(config))
        workers = {name: Worker(name, front, _ready(front, log)["grpc"]) for name, front in fronts.items()}
        settings = {"http_port": 0, "grpc_port": 0, "model": str(model), "served_model_name": MODEL, **router}
        addresses = tuple(worker.address for worker in workers.values())
        door = start("services.router", RouterConfig.model_validate({**settings, "workers": addresses}))
        said = _ready(door, log)
        _all_found(said["grpc"])
        yield Loose(Cluster(door, said["grpc"], said["http"], log), workers)


@contextlib.contextmanager
def lone_worker(model: Path, role: Role, **sections: dict[str, Any]) -> Iterator[Worker]:
    """A worker that nobody supervises and no router knows; `sections` as above. Stopped at the end."""
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        stderr = stack.enter_context(log.open("w"))
        config = {"name": f"{role}-0", "role": role, "model": str(model), **sections}
        front = _start("services.worker", WorkerConfig.model_validate(config), stderr)
        stack.callback(_stop, front, log)
        yield Worker(f"{role}-0", front, _ready(front, log)["grpc"])


def _start(module: str, config: StrictModel, stderr: IO[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", module],
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


def _ready(process: subprocess.Popen[str], log: Path) -> dict[str, str]:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        line = process.stdout.readline() if selector.select(START_S) else ""
    assert line, f"not ready, exit code {process.poll()}\n{log.read_text()[-4000:]}"
    return dict(json.loads(line)["ready"])


def _all_found(router: str) -> None:
    """A router is ready when some pair serves; a test that counts on every worker waits for every one."""
    deadline = time.monotonic() + START_S
    with grpc.insecure_channel(router) as channel:
        while True:
            status = RouterServiceStub(channel).GetStatus(GetStatusRequest(), timeout=10)
            if all(worker.state == WorkerState.WORKER_STATE_READY for worker in status.workers):
                return
            assert time.monotonic() < deadline, status
            time.sleep(0.02)


def _stop(process: subprocess.Popen[str], log: Path) -> None:
    assert process.stdout is not None
    with process.stdout:
        if process.poll() is not None:
            return  # a test killed it, or its other half
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(ENDS_S)
            raise
        assert code == 0, log.read_text()[-4000:]
