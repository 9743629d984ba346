"""Processes of a measurement: starts a cluster or a child that answers, pins them, and reads what they use.

On a machine of two cores the kernel packs processes that wake each other onto one core, and leaves them there
for seconds, so the placement is part of the measurement and is chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from baton.base.cluster_auth import RpcToken
from baton.base.process_stat import process_stat
from baton.v1.admin_pb2 import AdminServiceGetAuditRequest, WorkerReport
from baton.v1.admin_pb2_grpc import AdminServiceStub
from services.common.processes.process_tree import descendants

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# Fields of /proc/stat's first line that are not computing time.
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
# Of an AdminService; of a child, which may load a model and capture its graphs; of a child's end.
_REPORT_S, _ANSWER_S, _END_S = 10.0, 300.0, 10.0
# The secret of a measurement's cluster, whose workers are called directly.
CLUSTER_SECRET = "the secret of a measurement's cluster"
METADATA = RpcToken(CLUSTER_SECRET).metadata
# Time to load and compile; then to drain and kill.
_START_S = 300.0
_STOP_S = 40.0
_READY = "READY "


class Usage:
    """Processor time of the given processes and of the machine since construction."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        """`processes`: name → pid. Raises FileNotFoundError where one has ended."""
        self._pids = dict(processes)
        self._begun = time.monotonic(), _machine(), self._seconds()

    def shares(self) -> dict[str, float]:
        """Usage since construction, in processors: by name, then `others` and `stolen` (by the host)."""
        began, machine, before = self._begun
        wall = time.monotonic() - began
        now = self._seconds()
        ours = {name: (now[name] - before[name]) / wall for name in now}
        busy, stolen = ((b - a) / wall for a, b in zip(machine, _machine(), strict=True))
        return {**ours, "others": max(0.0, busy - sum(ours.values())), "stolen": stolen}

    def _seconds(self) -> dict[str, float]:
        return {name: _cpu_s(pid) for name, pid in self._pids.items()}


def _cpu_s(pid: int) -> float:
    """Processor time that a process has used, in seconds. Raises FileNotFoundError where it has ended."""
    stat = process_stat(pid)
    if stat is None:
        raise FileNotFoundError(f"process {pid} has ended")
    return stat.cpu_s


def _machine() -> tuple[float, float]:
    """Seconds that all processors were busy, and that the host withheld."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT] - ticks[_STEAL]) * _TICK_S, ticks[_STEAL] * _TICK_S


async def worker_reports(admin: str) -> list[WorkerReport]:
    """Every worker's identity, address and integrity report, from the router's AdminService at `admin`
    (host:port)."""
    async with grpc.aio.insecure_channel(admin) as channel:
        answer = await AdminServiceStub(channel).GetAudit(AdminServiceGetAuditRequest(), timeout=_REPORT_S)
    return list(answer.workers)


async def cluster_processes(admin: str) -> dict[str, int]:
    """Pids of a cluster of one prefill and one decode worker: router, prefill_front, prefill_engine,
    decode_front, decode_engine; and this process, the clients.
    """
    router = [pid for pid in descendants(os.getpid()) if b"services.router" in _command(pid)]
    pids = {"clients": os.getpid(), "router": router[0]}
    for worker in await worker_reports(admin):
        role = worker.identity.name.partition("-")[0]
        pids |= {f"{role}_front": worker.report.front_pid, f"{role}_engine": worker.report.engine_pid}
    return pids


def put_on(cores: Collection[int], pid: int) -> None:
    """Pins all current threads of the process."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


class JsonLinesProcess:
    """Runs `python -m MODULE …`; `ready_line` is its first line. It ends when its stdin is closed."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self._unread = b""
        try:
            self.ready_line = self.receive()
        except (RuntimeError, TimeoutError):
            self.end()
            raise

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        self.send_command(request)
        return self.receive()

    def send_command(self, command: dict[str, Any]) -> None:
        """Sends a message without waiting for an answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Reads the next line. Raises RuntimeError where the process has ended, TimeoutError where no line
        arrives."""
        deadline = time.monotonic() + _ANSWER_S
        while not self.has_line(max(0.0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.process.args!r} has not answered for {_ANSWER_S:g} s")
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def has_line(self, within_s: float) -> bool:
        """True if a line is available within this many seconds."""
        assert self.process.stdout is not None
        if b"\n" in self._unread:
            return True
        if select.select([self.process.stdout], [], [], within_s)[0]:
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait(_END_S)}")
            self._unread += part
        return b"\n" in self._unread

    def end(self) -> None:
        """Closes its stdin and waits. Raises subprocess.TimeoutExpired where it had to be killed."""
        try:
            self.process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise


def first_gpu() -> dict[str, str]:
    """An environment in which a cluster sees one GPU, the first of this process, which its workers share."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}


@contextlib.asynccontextmanager
async def baton_up(
    model: Path, name: str, flags: Sequence[str], environment: Mapping[str, str]
) -> AsyncIterator[dict[str, str]]:
    """Runs a cluster on free ports without Ray and Redis; yields the addresses of READY by name.

    `environment` goes over this process's own; its stderr is this process's. Raises RuntimeError where it
    ends before it is ready, TimeoutError.
    """
    command = [
        sys.executable, "-m", "services.cli.main", "up", "--model", str(model), "--weights", "random",
        "--served-model-name", name, "--http-port", "0", "--grpc-port", "0",
        "--ray-address", "none", "--redis-url", "none", *flags,
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "BATON_CLUSTER_SECRET": CLUSTER_SECRET,
            **environment,
            "PYTHONUNBUFFERED": "1",
        },
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_S):
            line = (await process.stdout.readline()).decode()
        if not line.startswith(_READY):
            raise RuntimeError(f"baton up ended with {await process.wait()} before it was ready")
        yield dict(word.split("=", 1) for word in line.removeprefix(_READY).split())
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None:
            process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
