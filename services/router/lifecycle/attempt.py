"""The calls of one attempt: Reserve at decode, Prefill, and Cancel where it is given up.

Where decode is sure to have room, Prefill does not wait for Reserve's answer: the ticket follows it.

Owns the attempt's claim: it is released when decode's promise has ended, which is at a normal
end at once, and otherwise when decode has answered the cancel.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from baton.block_hash import MAX_RESERVE_HASHES
from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import GetHandoffRequest, ReserveRequest, TicketState
from baton.v1.prefill_pb2 import FirstToken, GiveTicketRequest, HandedOff, PrefillRequest
from baton.v1.types_pb2 import Attempt
from services.common.errors import from_grpc
from services.common.observability.logs import get_log
from services.router.workers.token_stream import attach
from services.router.workers.worker_error import WorkerError, failed_call

if TYPE_CHECKING:
    from baton.v1.decode_pb2 import Ticket
    from baton.v1.prefill_pb2 import PrefillResponse
    from services.router.lifecycle.cancels import Cancels
    from services.router.request.output_state import Sequence
    from services.router.request.request import Request
    from services.router.workers.placement import Claim

    Names = tuple[bytes, ...]
    PrefillCall = grpc.aio.UnaryStreamCall[PrefillRequest, PrefillResponse]

RESERVE_S = 5.0
_GIVE_TICKET_S = 5.0
_GET_HANDOFF_S = 2.0
# How long a cancel by decode waits for prefill's word: its first token may have ended the request.
_SETTLE_S = 2.0
# How long an output that has ended waits for prefill, which alone knows what of the prompt was cached.
_OVERTAKEN_S = 0.5
# What decode has begun, prefill's call is about to end: it is cut off only if it does not.
_TAIL_S = 2.0

_log = get_log("attempt")


class AttemptCalls:
    """One dispatch of one request. `reserve` and `prefill`, in this order or, with `give`, in the other; then
    read the sequence; then `finish` or `abandon`."""

    def __init__(
        self,
        request: Request,
        sequence: Sequence,
        claim: Claim,
        cancels: Cancels,
        block_hashes: Names = (),
    ) -> None:
        """`block_hashes`: of the prompt's first full blocks, as decode names them."""
        self._block_names = block_hashes[:MAX_RESERVE_HASHES]
        self._request = request
        self._sequence = sequence
        self._claim = claim
        self._cancels = cancels
        self._id = Attempt(request_id=request.id, number=sequence.attempt)
        # Number of this attempt's first token, which may be there before the slot is.
        self._first_number = len(sequence.emitted)
        self._over = False
        self._kv_bytes = 0
        self._call: PrefillCall | None = None
        # Ends with the call, always by itself: a task that is cancelled while it reads from a call of
        # grpc.aio leaves the call's memory behind (0.1 to 3 KB, grpcio 1.85).
        self._reading: asyncio.Task[None] | None = None
        # What prefill's call ended with, where it did not end well; cleared once looked into.
        self.prefill_error: BatonError | None = None
        self.handed_off: HandedOff | None = None

    @property
    def bytes_shipped(self) -> int:
        """KV bytes that the handoff moved, if there was one: all blocks of the ticket but for those held."""
        return self._kv_bytes if self.handed_off is not None or self._sequence.followed else 0

    async def reserve(self) -> Ticket:
        """Has decode promise a slot; BatonError(OVERLOADED) where it has none."""
        decode = self._claim.decode
        request = ReserveRequest(
            attempt=self._id,
            router_id=decode.router_id,
            token_count=len(self._request.prompt_ids) + self._first_number,
            first_number=self._first_number,
            max_tokens=self._request.max_tokens,
            ttl_ms=int(self._remaining_s() * 1000),
            block_hashes=self._block_names,
        )
        decode.sequences[self._request.id] = self._sequence
        call = decode.peer.decode.Reserve(request, timeout=RESERVE_S)
        try:
            with decode.while_alive(call):
                response = await call
        except grpc.aio.AioRpcError as error:
            failure = failed_call(error, decode.name)
            if failure.kind is ErrorKind.UNAVAILABLE:
                decode.unreachable()
            raise failure from error
        self._kv_bytes = response.kv_bytes
        self._sequence.reserved = True
        return response.ticket

    def prefill(self, ticket: Ticket | None) -> None:
        """Calls Prefill and reads its answers beside the way; without a ticket, that is to follow."""
        request = prefill_request(self._request, self._sequence, self._id, ticket)
        self._call = self._claim.prefill.peer.prefill.Prefill(request, timeout=self._remaining_s())
        self._reading = asyncio.create_task(self._read_prefill(self._call))

    async def give(self, ticket: Ticket) -> None:
        """Hands a prefill that runs already its ticket. Where that prefill has ended, its own error stands;
        otherwise raises BatonError."""
        request = GiveTicketRequest(attempt=self._id, ticket=ticket)
        worker = self._claim.prefill
        call = worker.peer.prefill.GiveTicket(request, timeout=_GIVE_TICKET_S)
        try:
            with worker.while_alive(call):
                await call
        except grpc.aio.AioRpcError as error:
            await self.settle()
            if self.prefill_error is None:
                reason = from_grpc(error, "GiveTicket").message
                raise WorkerError(ErrorKind.UNAVAILABLE, worker.name, reason) from error

    async def went_on(self) -> bool:
        """Prefill's stream broke: whether decode has the sequence all the same."""
        if self._sequence.followed:
            return True
        request, decode = GetHandoffRequest(attempt=self._id), self._claim.decode
        call = decode.peer.decode.GetHandoff(request, timeout=_GET_HANDOFF_S)
        try:
            with decode.while_alive(call):
                response = await call
        except (grpc.aio.AioRpcError, BatonError):
            return False
        if response.state == TicketState.TICKET_STATE_ENDED:
            # It ran to its end, or its ticket did: decode says which by replaying, or not.
            return await attach(decode, self._request.id, self._sequence)
        return response.state in (TicketState.TICKET_STATE_COMMITTED, TicketState.TICKET_STATE_ACTIVE)

    async def settle(self, within_s: float = _SETTLE_S) -> None:
        """Waits a little for prefill's call to end: it knows why what belongs to it failed elsewhere."""
        if self._reading is not None and not self._reading.done():
            await asyncio.wait((self._reading,), timeout=within_s)

    async def hear_prefill(self) -> None:
        """Where decode's stream has overtaken prefill's, waits a moment for what only prefill can tell."""
        if self._sequence.cached_tokens is None:
            await self.settle(min(_OVERTAKEN_S, self._remaining_s() / 2))

    def refused(self) -> None:
        """Decode had no room: nothing to cancel, and it is left alone for a moment."""
        self._claim.decode.refused()
        self.finish()

    def finish(self) -> None:
        """Decode's promise has ended by itself."""
        self._stop_listening()
        self._claim.release()

    def abandon(self) -> None:
        """Ends whatever of this attempt still runs, wherever it is. Never waits; nothing if over."""
        if self._over:
            return
        self._stop_listening()
        self._cancels.send(self._claim, self._id)

    def _stop_listening(self) -> None:
        self._over = True
        if self._call is not None and not self._call.done():
            if self._sequence.followed or self.handed_off is not None:
                asyncio.get_running_loop().call_later(_TAIL_S, self._call.cancel)
            else:
                self._call.cancel()
        self._claim.prefill_ended()
        self._claim.decode.sequences.pop(self._request.id, None)

    async def _read_prefill(self, call: PrefillCall) -> None:
        worker = self._claim.prefill
        try:
            with worker.while_alive(call):
                await self._take_events(call)
            ended_well = self.handed_off is not None or self._sequence.ending
            if not ended_well or not self._sequence.prompt_told:
                self.prefill_error = WorkerError(ErrorKind.INTERNAL, worker.name, "prefill ended early")
        except grpc.aio.AioRpcError as error:
            self._prefill_failed(failed_call(error, worker.name))
        except BatonError as error:  # the worker was lost
            self.prefill_error = error
        except Exception as error:  # a fault of ours must not leave the request waiting
            _log.exception("prefill_reader_failed", worker=worker.name)
            self.prefill_error = BatonError(ErrorKind.INTERNAL, f"the router failed: {type(error).__name__}")
        finally:
            self._claim.prefill_ended()
            self._sequence.wake()

    async def _take_events(self, call: PrefillCall) -> None:
        try:
            async for response in call:
                if response.HasField("first_token"):
                    self._take_first(response.first_token)
                elif response.HasField("prompt_logprobs"):
                    self._sequence.accept_prompt(self._id.number, response.prompt_logprobs)
                else:
                    self.handed_off = response.handed_off
        finally:
            call.cancel()

    def _prefill_failed(self, error: BatonError) -> None:
        """Keeps new work from a prefill worker that is away or full."""
        self.prefill_error = error
        if error.kind is ErrorKind.UNAVAILABLE:
            self._claim.prefill.unreachable()
        elif error.kind is ErrorKind.OVERLOADED:
            self._claim.prefill.refused()

    def _take_first(self, first: FirstToken) -> None:
        self._claim.prefill_ended()
        self._sequence.accept_first(self._id.number, first)

    def _remaining_s(self) -> float:
        return remaining_s(self._request)


def prefill_request(
    request: Request, sequence: Sequence, attempt: Attempt, ticket: Ticket | None
) -> PrefillRequest:
    """What prefill is asked: the prompt and what earlier attempts emitted, and how to draw the next."""
    return PrefillRequest(
        attempt=attempt,
        token_ids=[*request.prompt_ids, *sequence.emitted],
        prompt_length=len(request.prompt_ids),
        sampling=request.sampling,
        limits=request.limits,
        ticket=ticket,
        prompt_logprobs=not sequence.prompt_told,
        ticket_follows=ticket is None and request.max_tokens > 0,
    )


def remaining_s(request: Request) -> float:
    """Until the request's deadline, as a call's timeout: never 0, which would mean none."""
    return max(0.001, request.deadline - asyncio.get_running_loop().time())
