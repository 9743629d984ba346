"""The PrefillService of a worker: each call is a command to the engine, whose events are its responses."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc

from baton.base.errors import BatonError, ErrorKind
from baton.v1.engine_pb2 import CancelCommand, EngineCommand
from baton.v1.prefill_pb2 import PrefillRequest, ProvideTicketRequest, ProvideTicketResponse
from baton.v1.prefill_pb2_grpc import PrefillServiceServicer
from baton.v1.types_pb2 import Attempt
from services.common.engine.attempt_key import AttemptKey
from services.common.engine.client import EngineClient
from services.common.errors import abort
from services.common.observability.tracing.recorder import SpanRecorder
from services.common.processes.drain import Drain
from services.grammar.channel_process import START_S
from services.grammar.client import MaskClient
from services.grammar.strip import without_grammar
from services.prefill.call_spans import CallSpans
from services.prefill.early_tickets import EarlyTickets

Context = grpc.aio.ServicerContext[Any, Any]

# Seconds behind its first token within which the ticket of a prompt is due: a router gives a reservation 5 s,
# and the call that brings the ticket as many.
TICKET_S = 20.0
# The same for a guided output, whose reservation may first wait for its worker's processes to start.
GUIDED_TICKET_S = TICKET_S + START_S


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
        # prompt. With each, when its ticket is due; None once it has come, or where none is to come.
        self._running: dict[AttemptKey, asyncio.Timeout | None] = {}
        # Attempts whose call waits for its first mask, which may take longer than tickets without a call are
        # kept, and the tickets that have come for them.
        self._waiting: set[AttemptKey] = set()
        self.held = EarlyTickets(lifetime_s=math.inf)
        self.early = EarlyTickets()

    async def Prefill(self, request: PrefillRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Streams the events of a call. Writes instead of yielding, so that a cancellation is always raised
        here."""
        finished, key = False, AttemptKey.of(request.attempt)
        if key in self._running or key in self._waiting:
            await abort(context, BatonError(ErrorKind.CONFLICT, "this attempt is being prefilled already"))
        spans = CallSpans.of(self._spans, request)
        request.ClearField("trace")  # the engine has no use for it
        ticket_s = GUIDED_TICKET_S if request.HasField("grammar") else TICKET_S
        try:
            self._drain.check()
            self._waiting.add(key)
            if (early := self.early.take(key)) is not None:
                self.held.add(key, early)
            mask = await self._first_mask(request)
            self._waiting.remove(key)
            if (ticket := self.held.take(key)) is not None:
                request.ticket.CopyFrom(ticket)
                request.ticket_follows = False
            command = EngineCommand(prefill=request, first_token_mask=mask)
            async with asyncio.timeout(None) as ticket_due:
                self._running[key] = ticket_due if request.ticket_follows else None
                async for event in self._engine.stream(command, None if spans is None else spans.ended):
                    if spans is not None:
                        spans.sent(event.prefill)
                    if event.prefill.HasField("first_token") and self._running[key] is not None:
                        ticket_due.reschedule(asyncio.get_running_loop().time() + ticket_s)
                    await context.write(event.prefill)
            finished = True
        except TimeoutError:
            message = f"no ticket came within {ticket_s:g} s of the first token"
            await abort(context, BatonError(ErrorKind.CONFLICT, message))
        except BatonError as error:
            finished = True
            if spans is not None:
                spans.error = error.kind.name.lower()
            await abort(context, error)
        finally:
            self._running.pop(key, None)
            self._waiting.discard(key)
            self.held.take(key)
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
                self._has_ticket(key)
            elif key in self._waiting:
                self.held.add(key, request.ticket)
            else:
                self.early.add(key, request.ticket)
        except BatonError as error:
            await abort(context, error)
        return ProvideTicketResponse()

    def _has_ticket(self, key: AttemptKey) -> None:
        """Records that the ticket of an attempt whose call runs has come."""
        due = self._running.get(key)
        if due is not None and not due.expired():
            due.reschedule(None)
            self._running[key] = None

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
