"""Status of the cluster: the router's totals and, for operators, the workers and the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio

from baton.v1.admin_pb2 import (
    AdminServiceGetAuditResponse,
    AdminServiceGetStatusRequest,
    AdminServiceGetStatusResponse,
    WorkerReport,
    WorkerStatus,
)
from baton.v1.router_pb2 import RouterStatus
from baton.v1.worker_pb2 import GetAuditRequest
from services.common.errors import from_grpc
from services.common.observability.audit_log import AuditLog
from services.router.auth.keys import Keys
from services.router.http.connections import Connections
from services.router.lifecycle.admission import ServedModel
from services.router.lifecycle.cancels import Cancels
from services.router.lifecycle.dispatcher import Dispatcher
from services.router.lifecycle.observations import Observations
from services.router.lifecycle.outbox import UnreadBudget
from services.router.lifecycle.readiness import Readiness
from services.router.observability.sliding_window import LONGEST_S, Recent, SlidingWindow, status_of
from services.router.observability.store import Store
from services.router.placement.pools import Pools
from services.router.processes.sibling_questions import SiblingQuestions
from services.router.queue.counted_queue import CountedQueue
from services.router.workers.directory import Directory
from services.router.workers.peer import Peer
from services.router.workers.worker import state_of

DEFAULT_WINDOW_S = 10
_REPORT_S = 5.0
# `baton status --watch` asks every second, so a worker that hangs must not delay the answer for longer.
_QUICK_REPORT_S = 1.0
# What a process asks its siblings for; the answer is `of_process`.
QUESTION = "status"


@dataclass(frozen=True)
class Status:
    """Collects status from the router's parts and its workers. The router's metrics read the same parts.

    `started`: monotonic seconds. `addresses`: this router's listeners by protocol, filled in once they are
    bound.
    """

    model: ServedModel
    observations: Observations
    window: SlidingWindow
    readiness: Readiness
    dispatcher: Dispatcher
    unread: UnreadBudget
    queue: CountedQueue
    cancels: Cancels
    directory: Directory
    pools: Pools
    store: Store
    connections: Connections
    started: float
    addresses: Mapping[str, str]
    siblings: SiblingQuestions
    keys: Keys | None = None
    audit_log: AuditLog | None = None

    async def reports(self, address: str | None = None) -> AdminServiceGetAuditResponse:
        """Integrity reports of the worker at `address` or of all, with block pools checked, and the store's
        status.

        A worker that does not answer in time has an error instead of its report.
        """
        peers = [peer for peer in self._peers() if address in (None, peer.address)]
        reports, store = await asyncio.gather(
            self._reports(peers, GetAuditRequest(), _REPORT_S), self.store.status()
        )
        return AdminServiceGetAuditResponse(workers=reports, store=store)

    async def full(self, request: AdminServiceGetStatusRequest) -> AdminServiceGetStatusResponse:
        """Totals, every worker, the store and the public addresses."""
        ask = GetAuditRequest(skip_integrity=not request.check_integrity)
        timeout_s = _REPORT_S if request.check_integrity else _QUICK_REPORT_S
        reports, store = await asyncio.gather(
            self._reports(self._peers(), ask, timeout_s), self.store.status()
        )
        return AdminServiceGetStatusResponse(
            router=await self.totals(request.window_s),
            workers=[self._worker(report) for report in reports],
            store=store,
            grpc_address=self.addresses.get("grpc", ""),
            http_address=self.addresses.get("http", ""),
            pools=self.pools.status(),
        )

    async def totals(self, window_s: int) -> RouterStatus:
        """This router's figures of the last `window_s` seconds (0: 10), of all its processes, without workers
        and addresses."""
        own = self.of_process(window_s)
        processes = [own, *(await self.siblings.ask(QUESTION, window_s)).values()]
        totals = status_of([Recent(**one["recent"]) for one in processes])
        totals.model = self.model.name
        totals.serving = self.readiness.serving()
        totals.running = sum(one["running"] for one in processes)
        totals.waiting = sum(one["waiting"] for one in processes)
        totals.uptime_s = max(one["uptime_s"] for one in processes)
        return totals

    def of_process(self, window_s: int) -> dict[str, Any]:
        """This process's part of `totals`, which can be JSON."""
        return {
            "recent": vars(self.window.recent(min(window_s or DEFAULT_WINDOW_S, LONGEST_S))),
            "running": self.dispatcher.running,
            "waiting": self.queue.waiting,
            "uptime_s": time.monotonic() - self.started,
        }

    def _worker(self, report: WorkerReport) -> WorkerStatus:
        worker = self.directory.at(report.address)
        return WorkerStatus(
            state=state_of(worker),
            worker=report,
            queued_tokens=worker.prefill_queue_tokens if worker is not None else 0,
            metrics_address=worker.described.metrics_address if worker is not None else "",
            pool=worker.pool if worker is not None else "",
            weight_format=worker.described.weight_format if worker is not None else "",
            failed_links=worker.links.status() if worker is not None else (),
        )

    def _peers(self) -> list[Peer]:
        return list(self.directory.peers.values())

    async def _reports(self, peers: list[Peer], ask: GetAuditRequest, timeout_s: float) -> list[WorkerReport]:
        return await asyncio.gather(*(self._report(peer, ask, timeout_s) for peer in peers))

    async def _report(self, peer: Peer, ask: GetAuditRequest, timeout_s: float) -> WorkerReport:
        worker = self.directory.at(peer.address)
        found = WorkerReport(address=peer.address, identity=worker.identity if worker is not None else None)
        try:
            response = await peer.worker.GetAudit(ask, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            found.error = from_grpc(error, peer.address).message
        else:
            found.report.CopyFrom(response.report)
        return found
