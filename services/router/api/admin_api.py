"""AdminService on its own gRPC port: full status, integrity reports, drains and switching pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio

from baton.base.errors import BatonError, ErrorKind
from baton.v1.admin_pb2 import (
    DESCRIPTOR,
    AdminServiceGetAuditRequest,
    AdminServiceGetAuditResponse,
    AdminServiceGetStatusRequest,
    AdminServiceGetStatusResponse,
    DrainRequest,
    DrainResponse,
    SwitchPoolRequest,
    SwitchPoolResponse,
)
from baton.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from services.common.errors import abort
from services.common.observability.audit_chain import AuditRecord
from services.common.observability.audit_log import AuditLog
from services.common.observability.logs import get_log
from services.router.lifecycle.dispatcher import Dispatcher
from services.router.observability.status import Status
from services.router.placement.pools import Pools
from services.router.workers.directory import Directory
from services.router.workers.worker import Worker

ADMIN_SERVICE_NAME = DESCRIPTOR.services_by_name["AdminService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]

_log = get_log("admin")


class AdminService(AdminServiceServicer):
    """Implements AdminService. `on_change` is called after a drain of the router began or ended, and after a
    switch to another pool."""

    def __init__(
        self,
        status: Status,
        directory: Directory,
        dispatcher: Dispatcher,
        pools: Pools,
        on_change: Callable[[], None],
        siblings_running: Callable[[], int] = lambda: 0,
        audit: AuditLog | None = None,
    ) -> None:
        """`siblings_running`: requests of the router's other processes. `audit`: where drains and switches
        are recorded."""
        self._audit = audit or AuditLog()
        self._status = status
        self._directory = directory
        self._dispatcher = dispatcher
        self._pools = pools
        self._on_change = on_change
        self._siblings_running = siblings_running

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server that is not started yet."""
        add_AdminServiceServicer_to_server(self, server)

    async def GetStatus(  # noqa: N802
        self, request: AdminServiceGetStatusRequest, context: Context
    ) -> AdminServiceGetStatusResponse:
        """Totals, the state and integrity report of every worker, and the state store."""
        return await self._status.full(request)

    async def GetAudit(  # noqa: N802
        self, request: AdminServiceGetAuditRequest, context: Context
    ) -> AdminServiceGetAuditResponse:
        """The integrity reports of one worker or of all, with their block pools checked."""
        try:
            return await self._status.reports(self._address(request.worker) if request.worker else None)
        except BatonError as error:
            await abort(context, error)

    async def Drain(self, request: DrainRequest, context: Context) -> DrainResponse:  # noqa: N802
        """Starts or ends a drain of a worker or of the router; returns at once what still runs."""
        try:
            if request.worker:
                return self._drain_worker(self._worker(request.worker), not request.resume)
        except BatonError as error:
            await abort(context, error)
        return self._drain_router(not request.resume)

    async def SwitchPool(  # noqa: N802
        self, request: SwitchPoolRequest, context: Context
    ) -> SwitchPoolResponse:
        """Makes new requests use another pool of workers."""
        try:
            self._pools.switch(request.pool)
        except BatonError as error:
            await abort(context, error)
        self._record("switch", f"pool {request.pool}")
        self._on_change()
        return SwitchPoolResponse(pools=self._pools.status())

    def _drain_worker(self, worker: Worker, drained: bool) -> DrainResponse:
        if worker.drained_by_operator != drained:
            _log.info("worker_drain_started" if drained else "worker_drain_ended", worker=worker.name)
            worker.set_drained(drained)
            self._record("drain" if drained else "resume", worker.name)
        running = worker.claimed_slots + worker.others.siblings.slots
        return DrainResponse(running=running, queued_tokens=worker.prefill_queue_tokens)

    def _drain_router(self, drained: bool) -> DrainResponse:
        if self._dispatcher.draining != drained:
            _log.info("router_drain_started" if drained else "router_drain_ended")
            self._dispatcher.set_draining(drained)
            self._record("drain" if drained else "resume", "router")
            self._on_change()
        queued = sum(worker.prefill_queue_tokens for worker in self._directory.workers)
        running = self._dispatcher.running + self._siblings_running()
        return DrainResponse(running=running, queued_tokens=queued)

    def _record(self, outcome: str, target: str) -> None:
        self._audit.record(AuditRecord("admin", outcome, target=target))

    def _address(self, name: str) -> str:
        """The address of a worker, by name or address; NOT_FOUND if there is none. An address may have no
        worker yet."""
        if name in self._directory.peers:
            return name
        return self._worker(name).peer.address

    def _worker(self, name: str) -> Worker:
        for worker in self._directory.workers:
            if name in (worker.name, worker.peer.address):
                return worker
        raise BatonError(ErrorKind.NOT_FOUND, f"no worker is called {name!r}")
