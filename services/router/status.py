"""How the cluster fares, for operators: this router's own figures of late, and every worker's audit."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio

from baton.v1.router_pb2 import (
    AuditClusterResponse,
    GetStatusRequest,
    GetStatusResponse,
    RouterStatus,
    StoreStatus,
    WorkerAudit,
    WorkerStatus,
)
from baton.v1.worker_pb2 import GetAuditRequest
from services.common.errors import from_grpc
from services.router.window import LONGEST_S
from services.router.worker_state import state_of

if TYPE_CHECKING:
    from services.router.directory import Directory
    from services.router.service import Service
    from services.router.store import Store
    from services.router.waiting_room import WaitingRoom
    from services.router.window import Window
    from services.router.worker import Peer

DEFAULT_WINDOW_S = 10
_AUDIT_S = 5.0
# A screen that is drawn anew every second cannot wait as long for a worker that hangs.
_QUICK_AUDIT_S = 1.0


@dataclass(frozen=True)
class Status:
    """Reads the router's parts and asks its workers."""

    service: Service
    room: WaitingRoom
    directory: Directory
    store: Store
    window: Window
    started: float

    async def audit(self) -> AuditClusterResponse:
        """Every worker's audit, its books checked, an error where it does not answer in time; the store."""
        audits, store = await asyncio.gather(self._audits(GetAuditRequest(), _AUDIT_S), self.store.status())
        return AuditClusterResponse(workers=audits, store=store)

    async def get(self, request: GetStatusRequest) -> GetStatusResponse:
        """Answers GetStatus."""
        ask = GetAuditRequest(skip_integrity=not request.check_integrity)
        timeout_s = _AUDIT_S if request.check_integrity else _QUICK_AUDIT_S
        audits, store = await asyncio.gather(self._audits(ask, timeout_s), self.store.status())
        workers = [self._worker(audit) for audit in audits]
        return GetStatusResponse(router=self._router(request.window_s, store), workers=workers)

    def _router(self, window_s: int, store: StoreStatus | None) -> RouterStatus:
        recent = self.window.recent(min(window_s or DEFAULT_WINDOW_S, LONGEST_S))
        return RouterStatus(
            model=self.service.intake.served_name,
            serving=self.service.usable(),
            running=self.service.dispatcher.live,
            waiting=self.room.waiting,
            uptime_s=time.monotonic() - self.started,
            window_s=recent.window_s,
            requests_per_s=recent.requests,
            errors_per_s=recent.errors,
            prompt_tokens_per_s=recent.prompt_tokens,
            completion_tokens_per_s=recent.completion_tokens,
            ttft=recent.latencies["ttft"],
            tpot=recent.latencies["tpot"],
            itl=recent.latencies["itl"],
            queue=recent.latencies["queue"],
            store=store,
        )

    def _worker(self, audit: WorkerAudit) -> WorkerStatus:
        worker = self.directory.at(audit.address)
        return WorkerStatus(
            state=state_of(worker),
            worker=audit,
            queued_tokens=worker.queued_tokens if worker is not None else 0,
            metrics_address=worker.described.metrics_address if worker is not None else "",
        )

    async def _audits(self, ask: GetAuditRequest, timeout_s: float) -> list[WorkerAudit]:
        peers = list(self.directory.peers.values())
        return await asyncio.gather(*(self._audit(peer, ask, timeout_s) for peer in peers))

    async def _audit(self, peer: Peer, ask: GetAuditRequest, timeout_s: float) -> WorkerAudit:
        worker = self.directory.at(peer.address)
        audit = WorkerAudit(address=peer.address, identity=worker.identity if worker is not None else None)
        try:
            response = await peer.worker.GetAudit(ask, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            audit.error = from_grpc(error, peer.address).message
        else:
            audit.audit.CopyFrom(response.audit)
        return audit
