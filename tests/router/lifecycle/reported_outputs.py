"""One request's output, and what prefill and decode report of it."""

from __future__ import annotations

from typing import Any

from baton.base.errors import ErrorKind
from baton.v1.decode_pb2 import SequenceOutput
from baton.v1.prefill_pb2 import FirstToken, PromptLogprobs
from baton.v1.router_pb2 import TokenIds
from baton.v1.types_pb2 import Attempt, FinishReason, Sampling
from services.router.lifecycle.outbox import Outbox
from services.router.lifecycle.output_state import OutputState
from services.router.request.request import Delta, Echo, Request
from tests.router.lifecycle.scripted_attempt import an_output
from tests.router.lifecycle.scripted_workers import REQUEST_ID, logprobs_message

PROMPT = (1, 2, 3, 4, 5)
RUNS = FinishReason.FINISH_REASON_UNSPECIFIED
STOP = FinishReason.FINISH_REASON_STOP
LENGTH = FinishReason.FINISH_REASON_LENGTH
PREEMPTED = FinishReason.FINISH_REASON_PREEMPTED
CANCELLED = FinishReason.FINISH_REASON_CANCELLED


def an_output_of(
    *,
    logprobs: bool = False,
    echo: bool = False,
    attempt: int = 1,
    predicted: bool = False,
) -> tuple[OutputState, Outbox]:
    """The output of a request for four tokens after a prompt of five."""
    sampling = Sampling(logprobs=2) if logprobs or echo else Sampling()
    request = Request(
        id=REQUEST_ID,
        prompt_ids=PROMPT,
        sampling=sampling,
        max_tokens=4,
        stop_token_ids=(),
        stop=(),
        skip_special_tokens=True,
        arrived_ns=0,
        deadline=0.0,
        echo=Echo("") if echo else None,
        prediction=TokenIds(ids=[1, 2]) if predicted else None,
    )
    output, outbox = an_output(request)
    if attempt:
        output.begin(attempt)
    return output, outbox


def delivered(outbox: Outbox) -> Delta:
    """The delta that was delivered since the last call; an empty one if there is none."""
    return outbox.take() or Delta(0)


def error_of(output: OutputState) -> tuple[ErrorKind, str]:
    assert output.error is not None
    return output.error.kind, str(output.error)


def first_token(number: int, token: int, **fields: Any) -> FirstToken:
    return FirstToken(number=number, token_id=token, **fields)


def decoded(
    first: int, ids: list[int], ending: FinishReason.ValueType = RUNS, attempt: int = 1, **fields: Any
) -> SequenceOutput:
    where = Attempt(request_id=REQUEST_ID, number=attempt)
    return SequenceOutput(attempt=where, first_number=first, token_ids=ids, finish_reason=ending, **fields)


def a_run(position: int, *values: float) -> PromptLogprobs:
    return PromptLogprobs(first_position=position, logprobs=[logprobs_message(value) for value in values])


def serialised(*values: float) -> list[bytes]:
    return [logprobs_message(value).SerializeToString() for value in values]
