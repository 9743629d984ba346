"""Prefill's gRPC face: one call a request, events passed on as they come."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from baton.errors import BatonError
from baton.v1.engine_pb2 import CancelCommand, EngineCommand, PrefillCommand
from baton.v1.prefill_pb2 import PrefillRequest
from baton.v1.prefill_pb2_grpc import PrefillServiceServicer
from baton.v1.types_pb2 import Attempt
from services.common.drain import Drain
from services.common.engine_client import EngineClient
from services.common.errors import abort

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(PrefillServiceServicer):
    """Validates little: token ids and limits are the engine's to judge."""

    def __init__(self, engine: EngineClient, drain: Drain) -> None:
        self._engine = engine
        self._drain = drain

    async def Prefill(self, request: PrefillRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Writes instead of yielding, so that a cancel is always raised here."""
        finished = False
        try:
            self._drain.check()
            async for event in self._engine.stream(EngineCommand(prefill=PrefillCommand(request=request))):
                await context.write(event.prefill)
            finished = True
        except BatonError as error:
            finished = True
            await abort(context, error)
        finally:
            if not finished:
                await self._stop(request.attempt)

    async def _stop(self, attempt: Attempt) -> None:
        """The router went away or cancelled: the engine stops between two chunks."""
        command = EngineCommand(cancel=CancelCommand(attempt=attempt, prefill_only=True))
        try:
            await asyncio.shield(self._engine.tell(command))
        except BatonError:
            pass  # the engine is gone, and its prefills with it
