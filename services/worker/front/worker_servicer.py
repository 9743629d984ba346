"""The WorkerService of every worker: identity, limits, load, integrity report."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.base.errors import BatonError
from baton.base.process_watch import process_space
from baton.v1.engine_pb2 import EngineCommand, ReadyEvent
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import DescribeRequest, DescribeResponse, GetAuditRequest, GetAuditResponse, Load
from baton.v1.worker_pb2_grpc import WorkerServiceServicer
from services.common.engine.client import EngineClient
from services.common.errors import abort
from services.common.processes.drain import Drain

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(eq=False)
class WorkerServicer(WorkerServiceServicer):
    """Answers WorkerService's calls with the engine's own counts."""

    engine: EngineClient
    identity: WorkerIdentity
    ready: ReadyEvent
    drain: Drain
    # Why the worker should get no new work; None where it may.
    unready: Callable[[], str | None]
    metrics_address: str = ""
    # How long Describe waits for the engine's load. An engine may be busy with a step for longer: the front
    # itself detects one that hangs, and to routers Describe is the front's heartbeat.
    load_s: float = 0.25
    # The latest that the engine has reported.
    load: Load = field(default_factory=Load, init=False)
    # At most one request at a time is sent to the engine.
    _updating: asyncio.Task[None] | None = field(default=None, init=False)

    async def update_load(self) -> None:
        """Updates `load` from the engine. Raises BatonError where the engine does not answer."""
        self.load = (await self.engine.call(EngineCommand(describe=DescribeRequest()))).load

    async def Describe(self, request: DescribeRequest, context: Context) -> DescribeResponse:  # noqa: N802
        """The latest load; an earlier one where the engine takes longer than `load_s` to answer."""
        if self._updating is None:
            self._updating = asyncio.create_task(self.update_load())
        updating = self._updating
        await asyncio.wait((updating,), timeout=self.load_s)
        if updating.done():
            self._updating = None
            if isinstance(error := updating.exception(), BatonError):
                await abort(context, error)
        return self.describe()

    def describe(self) -> DescribeResponse:
        """Identity and limits of this worker, with its latest load."""
        return DescribeResponse(
            identity=self.identity,
            fingerprint=self.ready.fingerprint,
            max_context_tokens=self.ready.max_context_tokens,
            vocab_size=self.ready.vocab_size,
            load=self.load,
            draining=self.drain.started,
            metrics_address=self.metrics_address,
            cache_dtype=self.ready.cache_dtype,
            pool=self.ready.pool,
            weight_format=self.ready.weight_format,
            unready=self.unready() or "",
            receives_handoffs=bool(self.ready.transfer_endpoints),
            limits=self.ready.limits,
            process_id=os.getpid(),
            process_space=process_space(),
        )

    async def GetAudit(self, request: GetAuditRequest, context: Context) -> GetAuditResponse:  # noqa: N802
        try:
            event = await self.engine.call(EngineCommand(report=request))
        except BatonError as error:
            await abort(context, error)
        event.report.front_pid = os.getpid()
        return GetAuditResponse(report=event.report)
