"""One Prefill call, and the task that reads it."""

from __future__ import annotations

import asyncio
import time

import grpc.aio

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.v1.decode_pb2 import Ticket
from baton.v1.prefill_pb2 import HandedOff, PrefillRequest, PrefillResponse
from baton.v1.types_pb2 import Attempt
from services.common.observability.logs import get_log
from services.router.lifecycle.output_state import OutputState
from services.router.placement.claim import PrefillClaim
from services.router.request.request import Request
from services.router.workers.worker_error import WorkerError, from_rpc_error

Call = grpc.aio.UnaryStreamCall[PrefillRequest, PrefillResponse]

_log = get_log("attempt")


class PrefillCall:
    """Runs the prompt of one attempt at a prefill worker; what it reports goes to the output.

    Releases the worker's queue share once the prompt is computed, and marks a worker that failed.
    """

    def __init__(self, request: Request, output: OutputState, claim: PrefillClaim) -> None:
        self._request = request
        self._output = output
        self._claim = claim
        self._attempt = Attempt(request_id=request.id, number=output.attempt)
        self._call: Call | None = None
        # Ends with the call, never by being cancelled: a task that is cancelled while it reads a call of
        # grpc.aio leaks the call's memory (0.1 to 3 KB, grpcio 1.85).
        self._reader: asyncio.Task[None] | None = None
        # Why the call failed.
        self.error: BatonError | None = None
        self.handed_off: HandedOff | None = None

    def start(self, ticket: Ticket | None) -> None:
        """Begins the call; without a ticket, one follows by ProvideTicket if there is output to generate."""
        request, output = self._request, self._output
        message = PrefillRequest(
            attempt=self._attempt,
            token_ids=[*request.prompt_ids, *output.emitted],
            prompt_length=len(request.prompt_ids),
            sampling=request.sampling,
            limits=request.limits,
            ticket=ticket,
            prompt_logprobs=not output.prompt_complete,
            tenant=request.tenant,
            ticket_follows=ticket is None and request.max_tokens > 0,
            grammar=request.grammar if request.max_tokens > 0 else None,
            first_token_in_s=first_token_in_s(request) if not output.emitted else 0.0,
            trace=None
            if request.trace is None
            else request.trace.stage_context(request.id, "prefill").message(),
        )
        worker = self._claim.prefill
        self._call = worker.peer.prefill.Prefill(message, timeout=remaining_s(request))
        self._reader = asyncio.create_task(self._read(self._call))

    @property
    def ended(self) -> bool:
        return self._reader is not None and self._reader.done()

    async def wait(self, timeout_s: float) -> None:
        """Waits until the call has ended, at most `timeout_s`; not at all if it was never started."""
        if self._reader is not None and not self._reader.done():
            await asyncio.wait((self._reader,), timeout=timeout_s)

    def cancel(self, grace_s: float = 0) -> None:
        """Cancels the call if it has not ended within `grace_s`."""
        if self._call is None or self._call.done():
            return
        if grace_s:
            asyncio.get_running_loop().call_later(grace_s, self._call.cancel)
        else:
            self._call.cancel()

    async def _read(self, call: Call) -> None:
        worker = self._claim.prefill
        try:
            with worker.while_alive(call):
                await self._read_events(call)
            if not self._is_complete():
                self.error = WorkerError(ErrorKind.INTERNAL, worker.name, "prefill ended early")
        except grpc.aio.AioRpcError as error:
            self.error = from_rpc_error(error, worker.name)
            if self.error.cause is FailureCause.LINK:
                self._claim.link_failed(self.error.message)
            elif self.error.kind is ErrorKind.UNAVAILABLE:
                worker.unreachable()
            elif self.error.kind is ErrorKind.OVERLOADED:
                worker.refused()
        except BatonError as error:  # the worker was lost
            self.error = error
        except Exception as error:  # an internal error must not leave the request waiting
            _log.exception("prefill_reader_failed", worker=worker.name)
            self.error = BatonError(ErrorKind.INTERNAL, f"the router failed: {type(error).__name__}")
        finally:
            self._claim.prefill_ended()
            self._output.wake()

    async def _read_events(self, call: Call) -> None:
        try:
            async for response in call:
                if response.HasField("first_token"):
                    self._claim.prefill_ended()
                    self._output.accept_first_token(self._attempt.number, response.first_token)
                elif response.HasField("prompt_logprobs"):
                    self._output.accept_prompt_logprobs(self._attempt.number, response.prompt_logprobs)
                else:
                    self.handed_off = response.handed_off
                    self._claim.handed_off()
        finally:
            call.cancel()

    def _is_complete(self) -> bool:
        """True if a call that ended without an error has reported everything."""
        output = self._request.max_tokens == 0 or self.handed_off is not None or self._output.ending
        return bool(output) and self._output.prompt_complete


def first_token_in_s(request: Request) -> float:
    """Seconds until the first token is due by the request's limit; 0 without one, and where that is over."""
    if request.slo is None or request.slo.ttft_s is None:
        return 0.0
    waited_s = (time.monotonic_ns() - request.arrived_ns) / 1e9
    return max(0.0, request.slo.ttft_s - waited_s)


def remaining_s(request: Request) -> float:
    """Seconds until the request's deadline, as a call's timeout: never 0, which would mean none."""
    return max(0.001, request.deadline - asyncio.get_running_loop().time())
