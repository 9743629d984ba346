# ruff: noqa: N802 (gRPC names its methods so)
"""Workers without an engine: real gRPC servers before the arithmetic of `fake_model`.

A `FakeWorker` plays prefill, decode or both. `Behaviour` makes it fail in a chosen way, a chosen
number of times. `ledger` counts what is held: everything in it is 0 when nothing runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton.model_files import TokenizerFiles
from baton.tls.server import ServerTls
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.v1.decode_pb2 import TicketState
from baton.v1.types_pb2 import (
    Attempt,
    FinishReason,
    WorkerIdentity,
    WorkerRole,
)
from services.common.rpc.grpc_server import GrpcServer
from tests.router.behaviour import Behaviour
from tests.router.fake_model import VOCAB, ending_of, logprobs_of, next_token, prompt_logprobs, with_logprobs
from tests.router.fake_ticket import Ticketed

EXPOSED_NS = 1234
BYTES_PER_TOKEN = 64
BEAT_S = 0.2


class FakeWorker(
    worker_pb2_grpc.WorkerServiceServicer,
    prefill_pb2_grpc.PrefillServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
):
    """One worker; `async with` runs it."""

    def __init__(
        self,
        name: str,
        role: WorkerRole.ValueType,
        cluster: FakeCluster,
        slots: int = 8,
        fingerprint: bytes = b"same",
        max_context: int = 256,
    ) -> None:
        self.identity = WorkerIdentity(name=name, incarnation=secrets.token_bytes(16), role=role)
        self.cluster = cluster
        self.slots = slots
        self.fingerprint = fingerprint
        self.max_context = max_context
        # The pool and the weight format that it reports.
        self.pool = worker_pb2.Pool(
            model="fake",
            checkpoint=b"c",
            tokenizer=cluster.tokenizer,
            kv_format="float32/16/native",
            numerics="exact",
        )
        self.weight_format = "float32"
        self.behaviour = Behaviour()
        self.rates = worker_pb2.Rates()
        self.tls: ServerTls | None = None
        self.address = ""
        self.tickets: dict[bytes, Ticketed] = {}
        self.tombstones: set[tuple[bytes, int]] = set()
        self.running_prefills = 0
        self.cut_prefills = 0
        self.prompts: list[list[int]] = []
        self.last_prefill: prefill_pb2.PrefillRequest | None = None
        self.reserves: list[decode_pb2.ReserveRequest] = []
        self.prefill_requests: list[prefill_pb2.PrefillRequest] = []
        self.attaches = 0
        # For each Follow call with output, the number of positions in the router's request.
        self.most_positions = 0
        self.former_router_ids: list[bytes] = []
        self.cancels = 0
        self.most_slots_used = 0
        self.follows_opened = 0
        # Tickets that running prefills wait for.
        self._given: dict[bytes, asyncio.Future[decode_pb2.Ticket]] = {}
        self._followers: dict[bytes, int] = {}
        self._step = asyncio.Condition()
        self._steps = 0

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[FakeWorker]:
        """Runs the worker until the context ends."""
        server = GrpcServer(["baton.v1.WorkerService"], tls=self.tls)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server.server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server.server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server.server)
        self.address = await server.start("127.0.0.1", port)
        self.cluster.workers[self.identity.name] = self
        stepping = asyncio.create_task(self._run_steps())
        try:
            yield self
        finally:
            stepping.cancel()
            await asyncio.gather(stepping, return_exceptions=True)
            await server.stop(0)

    @property
    def used_slots(self) -> int:
        """Slots that tickets hold."""
        return sum(ticket.live for ticket in self.tickets.values())

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the prompts and outputs of live tickets."""
        return sum(ticket.token_count + ticket.max_tokens for ticket in self.tickets.values() if ticket.live)

    def ledger(self) -> dict[str, int]:
        """What is held now."""
        return {"slots": self.used_slots, "prefills": self.running_prefills}

    # WorkerService

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Any
    ) -> worker_pb2.DescribeResponse:
        if self.behaviour.over:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no engine")
        if self.behaviour.deaf:
            await asyncio.Event().wait()
        return worker_pb2.DescribeResponse(
            identity=self.identity,
            fingerprint=self.fingerprint,
            max_context_tokens=self.max_context,
            vocab_size=VOCAB,
            load=worker_pb2.Load(
                slots=self.slots,
                free_slots=self.slots - self.used_slots - self.behaviour.foreign_slots,
                blocks=1000,
                free_blocks=1000,
                block_tokens=16,
                rates=self.rates,
            ),
            cache_dtype="float32",
            draining=self.behaviour.draining,
            pool=self.pool,
            weight_format=self.weight_format,
        )

    async def GetAudit(
        self, request: worker_pb2.GetAuditRequest, context: Any
    ) -> worker_pb2.GetAuditResponse:
        return worker_pb2.GetAuditResponse(audit=worker_pb2.Audit(prompts_run=len(self.prompts)))

    # DecodeService

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        self.reserves.append(request)
        key = request.attempt.request_id
        await asyncio.sleep(self.behaviour.reserve_s)
        if self.behaviour.refuse_reserves > 0 or self.used_slots >= self.slots:
            self.behaviour.refuse_reserves -= 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no slot")
        capacity = self.behaviour.capacity_tokens
        wanted = request.token_count + request.max_tokens
        if capacity is not None and self.reserved_tokens + wanted > capacity:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no blocks")
        if (key, request.attempt.number) in self.tombstones:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "cancelled")
        if request.router_id not in self._followers:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no Subscribe stream of this router")
        self.tickets[key] = Ticketed(
            request.attempt, request.router_id, request.token_count, watermark=request.first_number
        )
        self.tickets[key].max_tokens = request.max_tokens
        self.most_slots_used = max(self.most_slots_used, self.used_slots)
        body = decode_pb2.TicketBody(attempt=request.attempt, issuer=self.identity)
        local = self.identity.role == WorkerRole.WORKER_ROLE_BOTH
        return decode_pb2.ReserveResponse(
            ticket=decode_pb2.Ticket(body=body.SerializeToString()),
            kv_bytes=0 if local else BYTES_PER_TOKEN * request.token_count,
        )

    async def Subscribe(
        self, request: decode_pb2.SubscribeRequest, context: Any
    ) -> AsyncIterator[decode_pb2.SubscribeResponse]:
        if request.incarnation != self.identity.incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the request is for another incarnation")
        self.follows_opened += 1
        mine = self._followers[request.router_id] = self.follows_opened
        if self.behaviour.send_metadata:
            await context.send_initial_metadata(())
        unknown = self._go_to(request.positions)
        self.former_router_ids = list(request.former_router_ids)
        if not self.behaviour.silent:
            yield decode_pb2.SubscribeResponse(step=self._steps, unknown=unknown)
        sent, spoke_at = 0, time.monotonic()
        while self._followers[request.router_id] == mine:
            if self.behaviour.over:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no engine")
            outputs = self._outputs(request.router_id)
            if outputs:
                sent += 1
                due = sent > self.behaviour.drop_after if mine == 1 else bool(request.positions)
                if due and self.behaviour.follow_drops > 0:
                    self.behaviour.follow_drops -= 1
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "stream dropped")
                self.most_positions = max(self.most_positions, len(request.positions))
                yield decode_pb2.SubscribeResponse(step=self._steps, outputs=outputs)
                spoke_at = time.monotonic()
            elif time.monotonic() > spoke_at + BEAT_S and not self.behaviour.silent:
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
        return unknown

    async def Attach(self, request: decode_pb2.AttachRequest, context: Any) -> decode_pb2.AttachResponse:
        self.attaches += 1
        ticket = self.tickets.get(request.attempt.request_id)
        if ticket is None or ticket.attempt.number != request.attempt.number:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such sequence")
        assert ticket is not None
        ticket.router_id = request.router_id
        ticket.watermark = request.next_number
        ticket.ending_sent = False
        return decode_pb2.AttachResponse()

    async def Cancel(self, request: decode_pb2.CancelRequest, context: Any) -> decode_pb2.CancelResponse:
        self.cancels += 1
        if self.behaviour.lose_cancels > 0:
            self.behaviour.lose_cancels -= 1
            await asyncio.Event().wait()
        self.tombstones.add((request.attempt.request_id, request.attempt.number))
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
        ticket.state = TicketState.TICKET_STATE_ACTIVE
        return True

    def release(self, attempt: Attempt) -> None:
        """The first token ended the request."""
        self.tickets.pop(attempt.request_id, None)

    def drop(self, attempt: Attempt) -> None:
        """Ends a ticket before its time."""
        self._end(self.tickets[attempt.request_id], FinishReason.FINISH_REASON_CANCELLED)

    async def _run_steps(self) -> None:
        while True:
            await asyncio.sleep(self.behaviour.step_s)
            active = [t for t in self.tickets.values() if t.state == TicketState.TICKET_STATE_ACTIVE]
            if len(active) < self.behaviour.steps_from:
                continue
            self.behaviour.steps_from = 0
            self._steps += 1
            for ticket in active:
                self._advance(ticket)
            async with self._step:
                self._step.notify_all()

    def _advance(self, ticket: Ticketed) -> None:
        if self.behaviour.moves > 0 and len(ticket.emitted) >= self.behaviour.move_at:
            self.behaviour.moves -= 1
            self._end(ticket, FinishReason.FINISH_REASON_PREEMPTED)
            return
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
            if ticket.router_id == router_id and news:
                outputs.append(self._output(ticket))
        return outputs

    def _output(self, ticket: Ticketed) -> decode_pb2.SequenceOutput:
        behaviour, first = self.behaviour, ticket.watermark
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
        )

    # PrefillService

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self.prefill_requests.append(request)
        self.running_prefills += 1
        if request.ticket_follows:
            self._given[request.attempt.SerializeToString()] = asyncio.get_running_loop().create_future()
        try:
            async for response in self._prefill(request, context):
                yield response
        except asyncio.CancelledError:
            self.cut_prefills += 1
            raise
        finally:
            self.running_prefills -= 1
            self._given.pop(request.attempt.SerializeToString(), None)

    async def ProvideTicket(
        self, request: prefill_pb2.ProvideTicketRequest, context: Any
    ) -> prefill_pb2.ProvideTicketResponse:
        waits = self._given.get(request.attempt.SerializeToString())
        if waits is None or waits.done():
            await context.abort(grpc.StatusCode.NOT_FOUND, "no prefill waits for it")
        assert waits is not None
        waits.set_result(request.ticket)
        return prefill_pb2.ProvideTicketResponse()

    async def _issuer(self, request: prefill_pb2.PrefillRequest) -> FakeWorker:
        """The worker that reserved the slot, once that is known here."""
        if request.ticket_follows:
            request.ticket.CopyFrom(await self._given[request.attempt.SerializeToString()])
        return self.cluster.workers[decode_pb2.TicketBody.FromString(request.ticket.body).issuer.name]

    async def _prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        breaking = self.behaviour.break_prefills > 0
        self.behaviour.break_prefills -= breaking
        if breaking and self.behaviour.break_at == "start":
            await context.abort(self.behaviour.break_code, "broke before the first token")
        await asyncio.sleep(self.behaviour.prefill_s)
        self.prompts.append(list(request.token_ids))
        self.last_prefill = request
        prompt_reports = list(prompt_logprobs(request, forgotten=int(self.behaviour.forget_logprobs)))
        if request.limits.max_tokens == 0:
            assert not request.HasField("ticket")
            for response in prompt_reports:
                yield response
            return
        first = next_token(request.token_ids)
        number = len(request.token_ids) - request.prompt_length
        output = [*request.token_ids[request.prompt_length :], first]
        ending = ending_of(output, request.limits.max_tokens, frozenset(request.limits.stop_token_ids))
        if ending and self.behaviour.cancelled_first:
            (await self._issuer(request)).drop(request.attempt)
            await asyncio.sleep(0.05)
        overtakes = self.behaviour.overtake_s > 0
        overtaken = overtakes and (await self._issuer(request)).commit(request, first)
        if overtaken:
            await asyncio.sleep(self.behaviour.overtake_s)
            if breaking:
                await context.abort(
                    self.behaviour.break_code, "failed before it reported what it had committed"
                )
        token = prefill_pb2.FirstToken(
            number=number,
            token_id=first,
            finish_reason=ending,
            cached_tokens=self.behaviour.cached_tokens,
        )
        if request.sampling.HasField("logprobs"):
            token.logprobs.CopyFrom(logprobs_of(first, request.sampling.logprobs))
        for response in (*prompt_reports, prefill_pb2.PrefillResponse(first_token=token)):
            yield response
        if breaking and self.behaviour.break_at == "first":
            await context.abort(self.behaviour.break_code, "broke after the first token")
        issuer = await self._issuer(request)
        if ending:
            issuer.release(request.attempt)
            return
        await asyncio.sleep(self.behaviour.handoff_s)
        if not overtaken and not issuer.commit(request, first):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no ticket")
        if breaking:
            await context.abort(self.behaviour.break_code, "broke after the commit")
        shipped = 0 if issuer is self else BYTES_PER_TOKEN * len(request.token_ids)
        yield prefill_pb2.PrefillResponse(
            handed_off=prefill_pb2.HandedOff(transport="fake", bytes_shipped=shipped, exposed_ns=EXPOSED_NS)
        )


class FakeCluster:
    """The fakes of one test, which hand over to each other by a call."""

    def __init__(self, tokenizer: bytes = b"") -> None:
        """`tokenizer`: the digest that its workers report."""
        self.tokenizer = tokenizer
        self.workers: dict[str, FakeWorker] = {}

    @classmethod
    def like(cls, folder: Path) -> FakeCluster:
        """A cluster whose workers report the tokenizer of this model's folder."""
        return cls(TokenizerFiles.read(folder).digest)

    def ledger(self) -> dict[str, int]:
        """The sum of the workers' ledgers."""
        ledgers = [worker.ledger() for worker in self.workers.values()]
        return {key: sum(ledger[key] for ledger in ledgers) for key in ("slots", "prefills")}
