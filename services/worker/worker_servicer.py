"""What every worker answers: who it is, what it holds, how busy it is."""

from __future__ import annotations

import os
from typing import Any

import grpc

from baton.errors import BatonError
from baton.v1.engine_pb2 import AuditCommand, DescribeCommand, EngineCommand, ReadyEvent
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import DescribeRequest, DescribeResponse, GetAuditRequest, GetAuditResponse, Load
from baton.v1.worker_pb2_grpc import WorkerServiceServicer
from services.common.drain import Drain
from services.common.engine_client import EngineClient
from services.common.errors import abort

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(WorkerServiceServicer):
    """Passes the engine's own counts on."""

    def __init__(
        self,
        engine: EngineClient,
        identity: WorkerIdentity,
        ready: ReadyEvent,
        drain: Drain,
        metrics_address: str = "",
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._ready = ready
        self._drain = drain
        self._metrics_address = metrics_address
        # As the engine told it last.
        self.load = Load()

    async def ask_load(self) -> None:
        """Has the engine tell its load; BatonError where it does not."""
        self.load = (await self._engine.call(EngineCommand(describe=DescribeCommand()))).load

    async def Describe(self, request: DescribeRequest, context: Context) -> DescribeResponse:  # noqa: N802
        try:
            await self.ask_load()
        except BatonError as error:
            await abort(context, error)
        return self.describe()

    def describe(self) -> DescribeResponse:
        """Who this worker is, its load as the engine told it last."""
        return DescribeResponse(
            identity=self._identity,
            fingerprint=self._ready.fingerprint,
            max_context_tokens=self._ready.max_context_tokens,
            vocab_size=self._ready.vocab_size,
            load=self.load,
            draining=self._drain.started,
            metrics_address=self._metrics_address,
            cache_dtype=self._ready.cache_dtype,
        )

    async def GetAudit(self, request: GetAuditRequest, context: Context) -> GetAuditResponse:  # noqa: N802
        try:
            command = EngineCommand(audit=AuditCommand(skip_integrity=request.skip_integrity))
            event = await self._engine.call(command)
        except BatonError as error:
            await abort(context, error)
        event.audit.front_pid = os.getpid()
        return GetAuditResponse(audit=event.audit)
