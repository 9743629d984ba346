"""The processes of a running cluster that a measurement looks at, and which processors they are on.

A machine of two cores packs what wakes each other on one of them, and leaves it there for seconds: where
processes run is part of what is measured, so it is chosen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

import grpc.aio

from baton.v1.router_pb2 import AuditClusterRequest
from baton.v1.router_pb2_grpc import RouterServiceStub
from services.common.process_tree import descendants


async def cluster_processes(channel: grpc.aio.Channel) -> dict[str, int]:
    """The pids of our own cluster of one prefill and one decode worker: router, prefill_front,
    prefill_engine, decode_front, decode_engine; and this process, the clients."""
    router = [pid for pid in descendants(os.getpid()) if b"services.router" in _command(pid)]
    pids = {"clients": os.getpid(), "router": router[0]}
    audit = await RouterServiceStub(channel).AuditCluster(AuditClusterRequest())
    for worker in audit.workers:
        role = worker.identity.name.partition("-")[0]
        pids |= {f"{role}_front": worker.audit.front_pid, f"{role}_engine": worker.audit.engine_pid}
    return pids


def put_on(cores: Collection[int], pid: int) -> None:
    """All threads that the process has now."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
