"""The processes of a running cluster, and their processors.

On a machine of two cores the kernel packs processes that wake each other onto one core, and leaves them there
for seconds, so the placement is part of the measurement and is chosen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

import grpc.aio

from baton.v1.admin_pb2 import AdminServiceGetAuditRequest, WorkerAudit
from baton.v1.admin_pb2_grpc import AdminServiceStub
from services.common.processes.process_tree import descendants

_ANSWER_S = 10.0


async def worker_audits(admin: str) -> list[WorkerAudit]:
    """Every worker's identity, address and audit, from the router's AdminService at `admin` (host:port)."""
    async with grpc.aio.insecure_channel(admin) as channel:
        answer = await AdminServiceStub(channel).GetAudit(AdminServiceGetAuditRequest(), timeout=_ANSWER_S)
    return list(answer.workers)


async def cluster_processes(admin: str) -> dict[str, int]:
    """Pids of a cluster of one prefill and one decode worker: router, prefill_front, prefill_engine,
    decode_front, decode_engine; and this process, the clients.
    """
    router = [pid for pid in descendants(os.getpid()) if b"services.router" in _command(pid)]
    pids = {"clients": os.getpid(), "router": router[0]}
    for worker in await worker_audits(admin):
        role = worker.identity.name.partition("-")[0]
        pids |= {f"{role}_front": worker.audit.front_pid, f"{role}_engine": worker.audit.engine_pid}
    return pids


def put_on(cores: Collection[int], pid: int) -> None:
    """All current threads of the process."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
