# ruff: noqa: N802 (gRPC names its methods so)
"""A decode worker without an engine, whose steps make a token of `fake_model` for each ticket."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2
from baton.v1.decode_pb2 import TicketState
from baton.v1.types_pb2 import Attempt, FinishReason, WorkerIdentity, WorkerRole
from services.common.errors import abort
from services.router.request.limits import Needs, WorkerLimits, kind_of
from tests.router.behaviour import Behaviour
from tests.router.fake_model import VOCAB, ending_of, next_token, with_logprobs
from tests.router.fake_ticket import Ticketed

BYTES_PER_TOKEN = 64
BEAT_S = 0.2
# Between steps that have nothing to do.
IDLE_S = 0.02


class FakeDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Tickets, steps and token streams; `run_steps` makes the tokens."""

    def __init__(
        self, identity: WorkerIdentity, slots: int, behaviour: Behaviour, limits: WorkerLimits
    ) -> None:
        """`limits`: those that it enforces."""
        self._limits = limits
        self.name = identity.name
        self._identity = identity
        self.slots = slots
        self._behaviour = behaviour
        self.tickets: dict[bytes, Ticketed] = {}
        self._tombstones: set[tuple[bytes, int]] = set()
        self.reserves: list[decode_pb2.ReserveRequest] = []
        # In a Subscribe request whose stream then had output.
        self.most_positions = 0
        self.former_router_ids: list[bytes] = []
        self.cancels = 0
        self.most_slots_used = 0
        self._subscriptions = 0
        # By router: its latest subscription.
        self._subscribers: dict[bytes, int] = {}
        self._step = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._steps = 0

    @property
    def used_slots(self) -> int:
        """The number of slots that tickets hold."""
        return sum(ticket.live for ticket in self.tickets.values())

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the prompts and outputs of live tickets."""
        return sum(ticket.token_count + ticket.max_tokens for ticket in self.tickets.values() if ticket.live)

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        self.reserves.append(request)
        key = request.attempt.request_id
        await asyncio.sleep(self._behaviour.reserve_s)
        if self._behaviour.refuse_reserves > 0 or self.used_slots >= self.slots:
            self._behaviour.refuse_reserves -= 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no slot")
        end = request.token_count - request.first_number + request.max_tokens
        if not self._limits.decodes(Needs(request.token_count, end, None, kind_of(request.grammar))):
            self._behaviour.beyond_limits += 1
            await abort(context, BatonError(ErrorKind.CONFLICT, "beyond a limit of this worker"))
        capacity = self._behaviour.capacity_tokens
        wanted = request.token_count + request.max_tokens
        if capacity is not None and self.reserved_tokens + wanted > capacity:
            await abort(context, BatonError(ErrorKind.OVERLOADED, "no blocks", cause=FailureCause.BLOCKS))
        if (key, request.attempt.number) in self._tombstones:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "cancelled")
        if request.router_id not in self._subscribers:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no Subscribe stream of this router")
        self.tickets[key] = Ticketed(
            request.attempt, request.router_id, request.token_count, watermark=request.first_number
        )
        self._wanted.set()
        self.tickets[key].max_tokens = request.max_tokens
        self.tickets[key].always_counted = request.counts_in_every_message or bool(
            request.prediction_token_ids
        )
        self.most_slots_used = max(self.most_slots_used, self.used_slots)
        body = decode_pb2.TicketBody(attempt=request.attempt, issuer=self._identity)
        local = self._identity.role == WorkerRole.WORKER_ROLE_BOTH
        return decode_pb2.ReserveResponse(
            ticket=decode_pb2.Ticket(body=body.SerializeToString()),
            kv_bytes=0 if local else BYTES_PER_TOKEN * request.token_count,
        )

    async def Subscribe(
        self, request: decode_pb2.SubscribeRequest, context: Any
    ) -> AsyncIterator[decode_pb2.SubscribeResponse]:
        if request.incarnation != self._identity.incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the request is for another incarnation")
        self._subscriptions += 1
        mine = self._subscribers[request.router_id] = self._subscriptions
        if self._behaviour.send_metadata:
            await context.send_initial_metadata(())
        unknown = self._go_to(request.positions)
        self.former_router_ids = list(request.former_router_ids)
        if not self._behaviour.silent:
            yield decode_pb2.SubscribeResponse(step=self._steps, unknown=unknown)
        sent, spoke_at = 0, time.monotonic()
        while self._subscribers[request.router_id] == mine:
            if self._behaviour.over:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no engine")
            outputs = self._outputs(request.router_id)
            if outputs:
                sent += 1
                due = sent > self._behaviour.drop_after if mine == 1 else bool(request.positions)
                if due and self._behaviour.follow_drops > 0:
                    self._behaviour.follow_drops -= 1
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "stream dropped")
                self.most_positions = max(self.most_positions, len(request.positions))
                yield decode_pb2.SubscribeResponse(step=self._steps, outputs=outputs)
                spoke_at = time.monotonic()
            elif time.monotonic() > spoke_at + BEAT_S and not self._behaviour.silent:
                yield decode_pb2.SubscribeResponse(step=self._steps)
                spoke_at = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S), self._step:
                    await self._step.wait()

    def _go_to(self, positions: Iterable[decode_pb2.Position]) -> list[Attempt]:
        """Sets watermarks; the attempts that are not here."""
        unknown = []
        for position in positions:
            ticket = self.tickets.get(position.attempt.request_id)
            if ticket is None or ticket.attempt.number != position.attempt.number:
                unknown.append(position.attempt)
            else:
                ticket.watermark, ticket.ending_sent = position.next_number, False
                self._wanted.set()
        return unknown

    async def Attach(self, request: decode_pb2.AttachRequest, context: Any) -> decode_pb2.AttachResponse:
        ticket = self.tickets.get(request.attempt.request_id)
        if ticket is None or ticket.attempt.number != request.attempt.number:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such sequence")
        assert ticket is not None
        ticket.router_id = request.router_id
        ticket.watermark = request.next_number
        ticket.ending_sent = False
        self._wanted.set()
        return decode_pb2.AttachResponse()

    async def Cancel(self, request: decode_pb2.CancelRequest, context: Any) -> decode_pb2.CancelResponse:
        self.cancels += 1
        if self._behaviour.lose_cancels > 0:
            self._behaviour.lose_cancels -= 1
            await asyncio.Event().wait()
        self._tombstones.add((request.attempt.request_id, request.attempt.number))
        ticket = self.tickets.get(request.attempt.request_id)
        if ticket is not None and ticket.attempt.number == request.attempt.number:
            del self.tickets[request.attempt.request_id]
        return decode_pb2.CancelResponse()

    async def GetHandoff(
        self, request: decode_pb2.GetHandoffRequest, context: Any
    ) -> decode_pb2.GetHandoffResponse:
        ticket = self.tickets.get(request.attempt.request_id)
        if ticket is None or ticket.attempt.number != request.attempt.number:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such attempt")
        assert ticket is not None
        return decode_pb2.GetHandoffResponse(state=ticket.state)

    def commit(self, request: prefill_pb2.PrefillRequest, first: int) -> bool:
        """A handoff arrived; False where its ticket is gone."""
        ticket = self.tickets.get(request.attempt.request_id)
        if ticket is None or ticket.attempt.number != request.attempt.number:
            return False
        assert ticket.token_count == len(request.token_ids)
        ticket.ids = [*request.token_ids, first]
        ticket.prompt_length = request.prompt_length
        ticket.max_tokens = request.limits.max_tokens
        ticket.stop_ids = frozenset(request.limits.stop_token_ids)
        ticket.sampling = request.sampling
        ticket.script = self._behaviour.script
        ticket.state = TicketState.TICKET_STATE_ACTIVE
        return True

    def release(self, attempt: Attempt) -> None:
        """The first token ended the request."""
        self.tickets.pop(attempt.request_id, None)

    def drop(self, attempt: Attempt) -> None:
        """Ends a ticket before its time."""
        self._end(self.tickets[attempt.request_id], FinishReason.FINISH_REASON_CANCELLED)

    async def run_steps(self) -> None:
        """Makes tokens until it is cancelled."""
        while True:
            await asyncio.sleep(self._behaviour.step_s)
            if not any(ticket.live or not ticket.ending_sent for ticket in self.tickets.values()):
                await self._until_wanted()
            active = [t for t in self.tickets.values() if t.state == TicketState.TICKET_STATE_ACTIVE]
            if len(active) < self._behaviour.steps_from:
                continue
            self._behaviour.steps_from = 0
            self._steps += 1
            for ticket in active:
                self._advance(ticket)
            async with self._step:
                self._step.notify_all()

    async def _until_wanted(self) -> None:
        """Waits while it has nothing to do, but no longer than `IDLE_S`: the idle steps of all such workers
        would be most of what a test computes."""
        self._wanted.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_S):
                await self._wanted.wait()

    def _advance(self, ticket: Ticketed) -> None:
        if self._behaviour.moves > 0 and len(ticket.emitted) >= self._behaviour.move_at:
            self._behaviour.moves -= 1
            self._end(ticket, FinishReason.FINISH_REASON_PREEMPTED)
            return
        if self._behaviour.forgets > 0 and len(ticket.emitted) >= self._behaviour.move_at:
            self._behaviour.forgets -= 1
            del self.tickets[ticket.attempt.request_id]
            return
        if ticket.script:
            made = len(ticket.ids) - ticket.prompt_length
            ticket.ids += ticket.script[made : made + self._behaviour.script_step]
        else:
            ticket.ids.append(next_token(ticket.ids))
        ending = ending_of(ticket.emitted, ticket.max_tokens, ticket.stop_ids)
        if ending:
            self._end(ticket, ending)

    def _end(self, ticket: Ticketed, ending: FinishReason.ValueType) -> None:
        ticket.ending = ending
        ticket.state = TicketState.TICKET_STATE_ENDED

    def _outputs(self, router_id: bytes) -> list[decode_pb2.SequenceOutput]:
        outputs = []
        for ticket in self.tickets.values():
            news = len(ticket.emitted) > ticket.watermark or (ticket.ending and not ticket.ending_sent)
            if news and ticket.ending and self._behaviour.withholds > 0:
                self._behaviour.withholds -= 1
                ticket.watermark, ticket.ending_sent = len(ticket.emitted), True
            elif ticket.router_id == router_id and news:
                outputs.append(self._output(ticket))
        return outputs

    def _output(self, ticket: Ticketed) -> decode_pb2.SequenceOutput:
        behaviour, first = self._behaviour, ticket.watermark
        if behaviour.repeat_all:
            first = 0
        skip = behaviour.skip_number
        if skip == first:
            first += 1
        # What would be one message with the token left out becomes two: the gap is between them.
        until = skip if skip is not None and first < skip < len(ticket.emitted) else len(ticket.emitted)
        ids = ticket.emitted[first:until]
        if behaviour.contradict and first == 0:
            ids[0] = (ids[0] + 1) % VOCAB
        ticket.watermark = until
        whole = until == len(ticket.emitted)
        ticket.ending_sent = whole and bool(ticket.ending)
        return decode_pb2.SequenceOutput(
            attempt=ticket.attempt,
            first_number=first,
            token_ids=ids,
            logprobs=with_logprobs(ticket.sampling, ids),
            finish_reason=ticket.ending if whole else FinishReason.FINISH_REASON_UNSPECIFIED,
            drafts=behaviour.drafts if ticket.ending_sent or ticket.always_counted else None,
        )
