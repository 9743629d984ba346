"""The PrefillService of a worker: each call is a command to the engine, whose events are its responses."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket
from baton.v1.engine_pb2 import CancelCommand, EngineCommand
from baton.v1.prefill_pb2 import PrefillRequest, ProvideTicketRequest, ProvideTicketResponse
from baton.v1.prefill_pb2_grpc import PrefillServiceServicer
from baton.v1.types_pb2 import Attempt
from services.common.engine.attempt_key import AttemptKey
from services.common.engine.client import EngineClient
from services.common.errors import abort
from services.common.observability.tracing.recorder import SpanRecorder
from services.common.processes.drain import Drain
from services.grammar.client import MaskClient
from services.grammar.strip import without_grammar
from services.prefill.call_spans import CallSpans
from services.prefill.early_tickets import EarlyTickets

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(PrefillServiceServicer):
    """Forwards calls to the engine, which validates them."""

    def __init__(
        self,
        engine: EngineClient,
        drain: Drain,
        masks: MaskClient | None = None,
        spans: SpanRecorder | None = None,
    ) -> None:
        """`masks`: computes those of first tokens; None: no output can be guided. `spans`: where calls are
        traced; None: nowhere."""
        self._masks = masks
        self._spans = spans
        self._engine = engine
        self._drain = drain
        # Attempts whose Prefill call runs: the engine receives further commands about them behind their
        # prompt.
        self._running: set[AttemptKey] = set()
        # Tickets of attempts whose call waits for its first mask, which may take longer than tickets without
        # a call are kept; None before the ticket has come.
        self._waiting: dict[AttemptKey, Ticket | None] = {}
        self.early = EarlyTickets()

    async def Prefill(self, request: PrefillRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Streams the events of a call. Writes instead of yielding, so that a cancellation is always raised
        here."""
        finished, key = False, AttemptKey.of(request.attempt)
        if key in self._running or key in self._waiting:
            await abort(context, BatonError(ErrorKind.CONFLICT, "this attempt is being prefilled already"))
        spans = CallSpans.of(self._spans, request)
        request.ClearField("trace")  # the engine has no use for it
        try:
            self._drain.check()
            self._waiting[key] = self.early.take(key)
            mask = await self._first_mask(request)
            if (ticket := self._waiting.pop(key)) is not None:
                request.ticket.CopyFrom(ticket)
                request.ticket_follows = False
            self._running.add(key)
            command = EngineCommand(prefill=request, first_token_mask=mask)
            async for event in self._engine.stream(command, None if spans is None else spans.ended):
                if spans is not None:
                    spans.sent(event.prefill)
                await context.write(event.prefill)
            finished = True
        except BatonError as error:
            finished = True
            if spans is not None:
                spans.error = error.kind.name.lower()
            await abort(context, error)
        finally:
            self._running.discard(key)
            self._waiting.pop(key, None)
            if spans is not None:
                spans.record(finished=finished)
            if not finished:
                await self._stop(request.attempt)

    async def ProvideTicket(self, request: ProvideTicketRequest, context: Context) -> ProvideTicketResponse:  # noqa: N802
        """Hands a ticket to its prefill; kept for a while where it overtakes its Prefill call on the way."""
        key = AttemptKey.of(request.attempt)
        try:
            if key in self._running:
                await self._engine.call(EngineCommand(provide_ticket=request))
            elif key in self._waiting:
                self._waiting[key] = request.ticket
            else:
                self.early.add(key, request.ticket)
        except BatonError as error:
            await abort(context, error)
        return ProvideTicketResponse()

    async def _first_mask(self, request: PrefillRequest) -> bytes:
        """The mask of the prompt's first output token; empty where its output is not guided. Takes the
        grammar out of the request. Raises BatonError where the grammar cannot be used."""
        grammar = without_grammar(request)
        if grammar is None:
            return b""
        if self._masks is None:
            raise BatonError(ErrorKind.CONFLICT, "this worker computes no grammar masks")
        source = await self._masks.source(request.tenant, grammar)
        return await self._masks.next_mask(source, request.limits, request.token_ids[request.prompt_length :])

    async def _stop(self, attempt: Attempt) -> None:
        """Stops the prefill between two chunks, once the router has cancelled or disconnected."""
        command = EngineCommand(cancel=CancelCommand(attempt=attempt, prefill_only=True))
        try:
            await asyncio.shield(self._engine.send(command))
        except BatonError:
            pass  # the engine is gone, and its prefills with it
