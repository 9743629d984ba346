# ruff: noqa: N802 (gRPC names its methods so)
"""A prefill worker without an engine: it computes first tokens by `fake_model`, and hands over by a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from baton.base.errors import BatonError, ErrorKind
from baton.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc
from services.common.errors import abort
from services.router.request.limits import Needs, WorkerLimits, kind_of
from tests.router.behaviour import Behaviour
from tests.router.fake_decode import BYTES_PER_TOKEN, FakeDecode
from tests.router.fake_model import ending_of, logprobs_of, next_token, prompt_logprobs

EXPOSED_NS = 1234


class FakePrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """Runs prompts, and keeps what it was asked for."""

    def __init__(
        self,
        decode_of: Callable[[str], FakeDecode],
        own: FakeDecode,
        behaviour: Behaviour,
        limits: WorkerLimits,
    ) -> None:
        """`decode_of`: the decode worker of a name. `own`: that of the same worker, to which no bytes are
        shipped. `limits`: those that it enforces."""
        self._limits = limits
        self._decode_of = decode_of
        self._own = own
        self._behaviour = behaviour
        self.running = 0
        self.cut = 0
        self.prompts: list[list[int]] = []
        self.requests: list[prefill_pb2.PrefillRequest] = []
        # The last one that was computed.
        self.last: prefill_pb2.PrefillRequest | None = None
        # Tickets that running prefills wait for.
        self._given: dict[bytes, asyncio.Future[decode_pb2.Ticket]] = {}

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self.requests.append(request)
        self.running += 1
        if request.ticket_follows:
            self._given[request.attempt.SerializeToString()] = asyncio.get_running_loop().create_future()
        try:
            async for response in self._prefill(request, context):
                yield response
        except asyncio.CancelledError:
            self.cut += 1
            raise
        finally:
            self.running -= 1
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

    async def _issuer(self, request: prefill_pb2.PrefillRequest) -> FakeDecode:
        """The worker that reserved the slot, once it is known here."""
        if request.ticket_follows:
            request.ticket.CopyFrom(await self._given[request.attempt.SerializeToString()])
        return self._decode_of(decode_pb2.TicketBody.FromString(request.ticket.body).issuer.name)

    async def _prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        if not self._limits.prefills(needs_of(request)):
            self._behaviour.beyond_limits += 1
            await abort(context, BatonError(ErrorKind.CONFLICT, "beyond a limit of this worker"))
        if self._behaviour.full_prefills > 0:
            self._behaviour.full_prefills -= 1
            await abort(context, BatonError(ErrorKind.OVERLOADED, "prefills wait already"))
        breaking = self._behaviour.break_prefills > 0
        self._behaviour.break_prefills -= breaking
        if breaking and self._behaviour.break_at == "start":
            await context.abort(self._behaviour.break_code, "broke before the first token")
        await asyncio.sleep(self._behaviour.prefill_s)
        self.prompts.append(list(request.token_ids))
        self.last = request
        prompt_reports = list(prompt_logprobs(request, forgotten=int(self._behaviour.forget_logprobs)))
        if request.limits.max_tokens == 0:
            assert not request.HasField("ticket")
            for response in prompt_reports:
                yield response
            return
        script = self._behaviour.script
        number = len(request.token_ids) - request.prompt_length
        first = script[number] if script else next_token(request.token_ids)
        output = [*request.token_ids[request.prompt_length :], first]
        ending = ending_of(output, request.limits.max_tokens, frozenset(request.limits.stop_token_ids))
        if ending and self._behaviour.cancelled_first:
            (await self._issuer(request)).drop(request.attempt)
            await asyncio.sleep(0.05)
        overtakes = self._behaviour.overtake_s > 0
        overtaken = overtakes and (await self._issuer(request)).commit(request, first)
        if overtaken:
            await asyncio.sleep(self._behaviour.overtake_s)
            if breaking:
                await context.abort(
                    self._behaviour.break_code, "failed before it reported what it had committed"
                )
        token = prefill_pb2.FirstToken(
            number=number,
            token_id=first,
            finish_reason=ending,
            cached_tokens=self._behaviour.cached_tokens,
        )
        if request.sampling.HasField("logprobs"):
            token.logprobs.CopyFrom(logprobs_of(first, request.sampling.logprobs))
        for response in (*prompt_reports, prefill_pb2.PrefillResponse(first_token=token)):
            yield response
        if breaking and self._behaviour.break_at == "first":
            await context.abort(self._behaviour.break_code, "broke after the first token")
        issuer = await self._issuer(request)
        if issuer.name in self._behaviour.broken_links:
            why, cause = f"no link to {issuer.name}", self._behaviour.broken_cause
            kind = ErrorKind.UNAVAILABLE if cause is not None else ErrorKind.CONFLICT
            await abort(context, BatonError(kind, why, cause=cause))
        if ending:
            issuer.release(request.attempt)
            return
        await asyncio.sleep(self._behaviour.handoff_s)
        if not overtaken and not issuer.commit(request, first):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no ticket")
        if breaking:
            await context.abort(self._behaviour.break_code, "broke after the commit")
        shipped = 0 if issuer is self._own else BYTES_PER_TOKEN * len(request.token_ids)
        yield prefill_pb2.PrefillResponse(
            handed_off=prefill_pb2.HandedOff(transport="fake", bytes_shipped=shipped, exposed_ns=EXPOSED_NS)
        )


def needs_of(request: prefill_pb2.PrefillRequest) -> Needs:
    """The needs of a prompt at the worker."""
    return Needs(
        len(request.token_ids),
        request.prompt_length + request.limits.max_tokens,
        request.sampling.logprobs if request.sampling.HasField("logprobs") else None,
        kind_of(request.grammar),
    )
