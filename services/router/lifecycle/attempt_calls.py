"""The calls of one attempt: Reserve at decode, Prefill, ProvideTicket, and Cancel if it is given up.

If decode certainly has a free slot, Prefill does not wait for Reserve's answer, and the ticket follows it.
The attempt's claim is released when decode's reservation has ended: at once at a normal end, otherwise once
decode has answered the cancel.
"""

from __future__ import annotations

import grpc
import grpc.aio

from baton.base.errors import BatonError, ErrorKind
from baton.model_spec.block_hash import MAX_RESERVE_HASHES
from baton.v1.decode_pb2 import GetHandoffRequest, ReserveRequest, Ticket, TicketState
from baton.v1.prefill_pb2 import ProvideTicketRequest
from baton.v1.types_pb2 import Attempt
from services.common.errors import from_grpc
from services.router.lifecycle.cancels import Cancels
from services.router.lifecycle.output_state import OutputState
from services.router.lifecycle.prefill_call import PrefillCall, remaining_s
from services.router.placement.claim import Claim
from services.router.request.request import Request
from services.router.workers.silent_attempts import attach
from services.router.workers.worker_error import WorkerError, from_rpc_error

RESERVE_S = 5.0
# The same for a guided output. The first one of a worker starts the processes that compute masks, which load
# a tokenizer; the worker bounds that itself (60 s), then the grammar's compilation and the first mask.
GUIDED_RESERVE_S = 70.0
PROVIDE_TICKET_S = 5.0
GET_HANDOFF_S = 2.0
# Wait for prefill's call when decode reports a cancel, in seconds: its first token may have ended the
# request.
PREFILL_END_S = 2.0
# Wait for prefill once an output has ended: it alone knows how much of the prompt was cached.
_CACHED_TOKENS_S = 0.5
# Once decode has started, prefill's call is about to end: it is cancelled only if it has not by then.
TAIL_S = 2.0


class AttemptCalls:
    """The calls of one dispatch of one request. Call `reserve`, then start `prefill`; or start it first and
    call `provide_ticket` afterwards. At the end call `finish` or `abandon`."""

    def __init__(
        self,
        request: Request,
        output: OutputState,
        claim: Claim,
        cancels: Cancels,
        block_hashes: tuple[bytes, ...] = (),
    ) -> None:
        """`block_hashes`: of the prompt's first full blocks, as decode's prefix cache has them."""
        self._block_hashes = block_hashes[:MAX_RESERVE_HASHES]
        self._request = request
        self._output = output
        self._claim = claim
        self._cancels = cancels
        self._attempt = Attempt(request_id=request.id, number=output.attempt)
        # Number of this attempt's first token. An early prefill may report it before decode has reserved.
        self._first_number = len(output.emitted)
        self._over = False
        self._kv_bytes = 0
        self.prefill = PrefillCall(request, output, claim)

    @property
    def kv_bytes_shipped(self) -> int:
        """KV bytes that the handoff moved, 0 without one: the ticket's blocks without prefix-cache hits."""
        return self._kv_bytes if self._handed_off else 0

    async def reserve(self) -> Ticket:
        """Reserves a slot at decode; BatonError(OVERLOADED) if it has none."""
        decode = self._claim.decode
        request = ReserveRequest(
            attempt=self._attempt,
            router_id=decode.router_id,
            token_count=len(self._request.prompt_ids) + self._first_number,
            first_number=self._first_number,
            max_tokens=self._request.max_tokens,
            ttl_ms=int(remaining_s(self._request) * 1000),
            block_hashes=self._block_hashes,
            tenant=self._request.tenant,
            own_prefill=self._claim.prefills_itself,
            tpot_slo_s=(self._request.slo and self._request.slo.tpot_s) or 0.0,
            trace=None if self._request.trace is None else self._request.trace.context.message(),
            max_draft_tokens=self._request.max_draft_tokens,
            counts_in_every_message=bool(self._request.stop),
        )
        if self._request.prediction is not None:
            request.prediction_token_ids.MergeFrom(self._request.prediction.ids)
        if self._request.grammar is not None:
            request.grammar.CopyFrom(self._request.grammar)
            request.limits.CopyFrom(self._request.limits)
            request.output_ids.extend(self._output.emitted[: self._first_number])
        decode.outputs[self._request.id] = self._output
        guided = self._request.grammar is not None
        call = decode.peer.decode.Reserve(request, timeout=GUIDED_RESERVE_S if guided else RESERVE_S)
        try:
            with decode.while_alive(call):
                response = await call
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error, decode.name)
            if failure.kind is ErrorKind.UNAVAILABLE:
                decode.unreachable()
            raise failure from error
        self._kv_bytes = response.kv_bytes
        self._output.reserved = True
        return response.ticket

    async def provide_ticket(self, ticket: Ticket) -> None:
        """Sends the ticket to a prefill that was started without one. If that prefill has failed, its error
        is in `prefill`; otherwise raises BatonError."""
        request = ProvideTicketRequest(attempt=self._attempt, ticket=ticket)
        worker = self._claim.prefill
        call = worker.peer.prefill.ProvideTicket(request, timeout=PROVIDE_TICKET_S)
        try:
            with worker.while_alive(call):
                await call
        except grpc.aio.AioRpcError as error:
            refusal = from_grpc(error, "ProvideTicket")
            if refusal.kind is ErrorKind.OVERLOADED:
                worker.refused()
                raise WorkerError(refusal.kind, worker.name, refusal.message) from error
            await self.prefill.wait(PREFILL_END_S)
            if self.prefill.error is None:
                raise WorkerError(ErrorKind.UNAVAILABLE, worker.name, refusal.message) from error

    async def decode_has_sequence(self) -> bool:
        """True if decode continues the sequence though prefill's call failed."""
        if self._output.decode_started:
            return True
        request, decode = GetHandoffRequest(attempt=self._attempt), self._claim.decode
        call = decode.peer.decode.GetHandoff(request, timeout=GET_HANDOFF_S)
        try:
            with decode.while_alive(call):
                response = await call
        except (grpc.aio.AioRpcError, BatonError):
            return False
        if response.state == TicketState.TICKET_STATE_ENDED:
            # The sequence ran to its end, or its ticket expired: only a sequence can be replayed.
            return await attach(decode, self._request.id, self._output)
        return response.state in (TicketState.TICKET_STATE_COMMITTED, TicketState.TICKET_STATE_ACTIVE)

    async def wait_for_cached_tokens(self) -> None:
        """Waits briefly for prefill's report if decode's stream has overtaken it."""
        if self._output.cached_tokens is None:
            await self.prefill.wait(min(_CACHED_TOKENS_S, remaining_s(self._request) / 2))

    def refused(self) -> None:
        """Ends an attempt for which decode had no room: there is nothing to cancel, and the worker gets no
        new work for `REFUSED_FOR_S`."""
        self._claim.decode.refused()
        self.finish()

    def finish(self) -> None:
        """Ends an attempt whose reservation decode has ended itself."""
        self._detach()
        self._claim.release()

    def abandon(self) -> None:
        """Ends whatever of this attempt still runs, without waiting. Does nothing after the first end."""
        if self._over:
            return
        self._detach()
        self._cancels.send(self._claim, self._attempt)

    @property
    def _handed_off(self) -> bool:
        return self.prefill.handed_off is not None or self._output.decode_started

    def _detach(self) -> None:
        self._over = True
        self.prefill.cancel(TAIL_S if self._handed_off else 0)
        self._claim.prefill_ended()
        self._claim.decode.outputs.pop(self._request.id, None)
