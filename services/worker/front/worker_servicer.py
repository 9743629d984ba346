"""What every worker answers: who it is, what it holds, how busy it is."""

from __future__ import annotations

import asyncio
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

# How long Describe waits for the engine's load. An engine may be busy with a step for longer; whether it
# hangs is the front's to judge, and routers take Describe for the front's own sign of life.
_LOAD_S = 0.25


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
        # At most one question at a time is with the engine.
        self._asking: asyncio.Task[None] | None = None

    async def ask_load(self) -> None:
        """Updates `load` from the engine. Raises BatonError where the engine does not answer."""
        self.load = (await self._engine.call(EngineCommand(describe=DescribeCommand()))).load

    async def Describe(self, request: DescribeRequest, context: Context) -> DescribeResponse:  # noqa: N802
        """Answers with the last known load where the engine takes longer than `_LOAD_S`."""
        if self._asking is None:
            self._asking = asyncio.create_task(self.ask_load())
        asking = self._asking
        await asyncio.wait((asking,), timeout=_LOAD_S)
        if asking.done():
            self._asking = None
            if isinstance(error := asking.exception(), BatonError):
                await abort(context, error)
        return self.describe()

    def describe(self) -> DescribeResponse:
        """Identity and limits of this worker, with its last known load."""
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
            command = EngineCommand(audit=AuditCommand(skip_integrity=request.skip_integrity))
            event = await self._engine.call(command)
        except BatonError as error:
            await abort(context, error)
        event.audit.front_pid = os.getpid()
        return GetAuditResponse(audit=event.audit)
