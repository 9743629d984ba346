"""The WorkerService of every worker: identity, limits, load, audit."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import grpc

from baton.errors import BatonError
from baton.v1.engine_pb2 import EngineCommand, ReadyEvent
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import DescribeRequest, DescribeResponse, GetAuditRequest, GetAuditResponse, Load
from baton.v1.worker_pb2_grpc import WorkerServiceServicer
from services.common.engine.client import EngineClient
from services.common.errors import abort
from services.common.processes.drain import Drain

Context = grpc.aio.ServicerContext[Any, Any]

# How long Describe waits for the engine's load. An engine may be busy with a step for longer: the front
# itself detects one that hangs, and to routers Describe is the front's heartbeat.
_LOAD_S = 0.25


class WorkerServicer(WorkerServiceServicer):
    """Answers with the engine's own counts."""

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
        # The latest that the engine has reported.
        self.load = Load()
        # At most one request at a time is sent to the engine.
        self._updating: asyncio.Task[None] | None = None

    async def update_load(self) -> None:
        """Updates `load` from the engine. Raises BatonError where the engine does not answer."""
        self.load = (await self._engine.call(EngineCommand(describe=DescribeRequest()))).load

    async def Describe(self, request: DescribeRequest, context: Context) -> DescribeResponse:  # noqa: N802
        """The latest load; an earlier one where the engine takes longer than `_LOAD_S` to answer."""
        if self._updating is None:
            self._updating = asyncio.create_task(self.update_load())
        updating = self._updating
        await asyncio.wait((updating,), timeout=_LOAD_S)
        if updating.done():
            self._updating = None
            if isinstance(error := updating.exception(), BatonError):
                await abort(context, error)
        return self.describe()

    def describe(self) -> DescribeResponse:
        """Identity and limits of this worker, with its latest load."""
        return DescribeResponse(
            identity=self._identity,
            fingerprint=self._ready.fingerprint,
            max_context_tokens=self._ready.max_context_tokens,
            vocab_size=self._ready.vocab_size,
            load=self.load,
            draining=self._drain.started,
            metrics_address=self._metrics_address,
            cache_dtype=self._ready.cache_dtype,
            pool=self._ready.pool,
            weight_format=self._ready.weight_format,
        )

    async def GetAudit(self, request: GetAuditRequest, context: Context) -> GetAuditResponse:  # noqa: N802
        try:
            command = EngineCommand(audit=request)
            event = await self._engine.call(command)
        except BatonError as error:
            await abort(context, error)
        event.audit.front_pid = os.getpid()
        return GetAuditResponse(audit=event.audit)
