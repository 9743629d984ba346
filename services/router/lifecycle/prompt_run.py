"""Runs a prompt for its logprobs alone: prefill without a ticket, so nothing is drawn or handed over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc.aio

from baton.errors import ErrorKind
from baton.v1.types_pb2 import Attempt
from services.router.lifecycle.attempt import prefill_request, remaining_s
from services.router.workers.worker_error import WorkerError, failed_call

if TYPE_CHECKING:
    from services.router.request.output_state import Sequence
    from services.router.request.request import Request
    from services.router.workers.placement import PrefillClaim


async def run_prompt(request: Request, sequence: Sequence, claim: PrefillClaim) -> None:
    """One attempt; afterwards the sequence has all of the prompt's logprobs. Releases the claim.

    Raises BatonError where the worker failed or broke its promise.
    """
    worker = claim.prefill
    attempt = Attempt(request_id=request.id, number=sequence.attempt)
    message = prefill_request(request, sequence, attempt, ticket=None)
    call = worker.peer.prefill.Prefill(message, timeout=remaining_s(request))
    try:
        with worker.while_alive(call):
            async for response in call:
                sequence.accept_prompt(attempt.number, response.prompt_logprobs)
                if sequence.fault is not None:
                    raise sequence.fault
    except grpc.aio.AioRpcError as error:
        failure = failed_call(error, worker.name)
        if failure.kind is ErrorKind.UNAVAILABLE:
            worker.unreachable()
        elif failure.kind is ErrorKind.OVERLOADED:
            worker.refused()
        raise failure from error
    finally:
        call.cancel()
        claim.release()
    if not sequence.prompt_told:
        raise WorkerError(ErrorKind.INTERNAL, worker.name, "prefill ended before all logprobs of the prompt")
