"""Two token streams report one output: what is kept, dropped, delivered, and what is an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1 import types_pb2
from baton.v1.decode_pb2 import SequenceOutput
from baton.v1.types_pb2 import Failure
from services.router.lifecycle.output_state import OutputState
from services.router.request.request import Delta
from services.router.workers.worker_error import WorkerError
from tests.router.lifecycle.reported_outputs import (
    CANCELLED,
    LENGTH,
    PREEMPTED,
    RUNS,
    STOP,
    a_run,
    an_output_of,
    decoded,
    delivered,
    error_of,
    first_token,
    serialised,
)
from tests.router.lifecycle.scripted_workers import logprobs_message

# The public state as an attempt begins.
FRESH: dict[str, Any] = {
    "emitted": [],
    "ending": RUNS,
    "error": None,
    "attempt_error": None,
    "decode_started": False,
    "ended_by_decode": False,
    "decoding": False,
    "reserved": False,
    "cached_tokens": None,
}


def state(output: OutputState) -> dict[str, Any]:
    return {name: getattr(output, name) for name in FRESH}


def test_before_the_first_attempt() -> None:
    output, outbox = an_output_of(attempt=0)
    assert state(output) == FRESH
    assert (output.attempt, output.prompt_complete, output.delivered) == (0, True, 0)
    assert outbox.take() is None


def test_an_attempt_begins_afresh_and_keeps_what_was_emitted() -> None:
    output, _ = an_output_of()
    output.accept_first_token(1, first_token(0, 10, cached_tokens=2))
    output.accept_decoded(decoded(1, [11], PREEMPTED))
    output.reserved = True
    output.lose(BatonError(ErrorKind.UNAVAILABLE, "gone"))
    output.begin(2)
    assert state(output) == {**FRESH, "emitted": [10, 11], "cached_tokens": 2}
    assert output.attempt == 2


def test_emitted_tokens_are_dropped_if_the_prompts_logprobs_are_incomplete() -> None:
    """The prompt is run once more, and no token was shown: so the output begins again."""
    output, outbox = an_output_of(echo=True)
    output.accept_decoded(decoded(0, [10], logprobs=[logprobs_message(-1)]))
    assert outbox.take() is None
    output.begin(2)
    assert state(output) == FRESH
    assert output.delivered == 0
    output.accept_prompt_logprobs(2, a_run(1, -1, -2, -3, -4))
    output.accept_decoded(decoded(0, [10], attempt=2, logprobs=[logprobs_message(-1)]))
    output.begin(3)
    assert output.emitted == [10]
    delta = delivered(outbox)
    assert (delta.token_ids, delta.logprobs) == ([10], serialised(-1))
    assert delta.prompt_logprobs == serialised(-1, -2, -3, -4)


@pytest.mark.parametrize("by", ["prefill", "decode", "prompt"])
def test_another_attempts_reports_change_nothing(by: str) -> None:
    output, outbox = an_output_of(echo=by == "prompt", attempt=3)
    for attempt in (2, 4):
        if by == "prefill":
            output.accept_first_token(attempt, first_token(0, 10, finish_reason=STOP, cached_tokens=2))
        elif by == "decode":
            output.accept_decoded(decoded(0, [10], STOP, attempt))
        else:
            output.accept_first_token(attempt, first_token(0, 10))
            output.accept_prompt_logprobs(attempt, a_run(1, -1, -2, -3, -4))
            assert not output.prompt_complete
    assert state(output) == FRESH
    assert outbox.take() is None


def test_a_token_is_delivered_within_its_report() -> None:
    output, outbox = an_output_of()
    output.accept_first_token(1, first_token(0, 97))
    output.accept_decoded(decoded(1, [98, 99]))
    assert (output.emitted, output.delivered) == ([97, 98, 99], 3)
    assert outbox.take() == Delta(0, [97, 98, 99], "abc", opening=True)


# (reported cached tokens, token number) -> what is kept.
CACHED = [(2, 0, 2), (0, 0, 0), (5, 0, 5), (7, 0, 5), (3, 1, None)]


@pytest.mark.parametrize(("reported", "number", "kept"), CACHED)
def test_cached_tokens_are_those_of_the_prompts_first_run(
    reported: int, number: int, kept: int | None
) -> None:
    """A later attempt finds what earlier ones computed: that was no saving. Nor is there more than the
    prompt has."""
    output, _ = an_output_of()
    output.accept(1, 0, [9] * number, RUNS)
    output.accept_first_token(1, first_token(number, 10, cached_tokens=reported))
    assert output.cached_tokens == kept
    assert output.emitted == [9] * number + [10]


def test_prefills_token_may_end_the_output() -> None:
    output, _ = an_output_of()
    output.accept_first_token(1, first_token(0, 10, finish_reason=STOP))
    assert state(output) == {**FRESH, "emitted": [10], "ending": STOP, "cached_tokens": 0}


# The reports of decode's stream -> emitted, ending, decode_started, ended by decode, decoding.
DECODED: list[tuple[list[SequenceOutput], tuple[Any, ...]]] = [
    ([decoded(0, [10])], ([10], RUNS, True, False, False)),
    ([decoded(0, [10, 11])], ([10, 11], RUNS, True, False, True)),
    ([decoded(1, [11])], ([10, 11], RUNS, True, False, True)),
    ([decoded(1, [11]), decoded(0, [10, 11, 12])], ([10, 11, 12], RUNS, True, False, True)),
    ([decoded(1, [11, 12]), decoded(1, [11])], ([10, 11, 12], RUNS, True, False, True)),
    ([decoded(1, [11, 12, 13], LENGTH)], ([10, 11, 12, 13], LENGTH, True, True, True)),
    ([decoded(1, [11], PREEMPTED), decoded(1, [11])], ([10, 11], PREEMPTED, True, True, True)),
    ([decoded(1, [11]), decoded(2, [], PREEMPTED)], ([10, 11], PREEMPTED, True, True, True)),
    ([decoded(1, [11], STOP), decoded(2, [], CANCELLED)], ([10, 11], STOP, True, True, True)),
    ([decoded(1, [11], LENGTH), decoded(2, [], CANCELLED)], ([10, 11], LENGTH, True, True, True)),
    ([decoded(1, [], CANCELLED), decoded(1, [11], STOP)], ([10, 11], STOP, True, True, True)),
    # A reservation that ended unused.
    ([decoded(1, [], CANCELLED)], ([10], CANCELLED, False, True, False)),
]


@pytest.mark.parametrize(("outputs", "expected"), DECODED)
def test_decodes_stream_continues_after_prefills_token(
    outputs: list[SequenceOutput], expected: tuple[Any, ...]
) -> None:
    output, _ = an_output_of()
    output.accept_first_token(1, first_token(0, 10, cached_tokens=1))
    for report in outputs:
        output.accept_decoded(report)
    emitted, ending, decode_started, ended_by_decode, decoding = expected
    assert state(output) == {
        **FRESH,
        "emitted": emitted,
        "ending": ending,
        "decode_started": decode_started,
        "ended_by_decode": ended_by_decode,
        "decoding": decoding,
        "cached_tokens": 1,
    }


# A report after the tokens 10 and 11 -> what is wrong with it.
FAULTS: list[tuple[SequenceOutput, str]] = [
    (decoded(3, [13]), "tokens 2 to 2 never came"),
    (decoded(5, [13]), "tokens 2 to 4 never came"),
    (decoded(1, [12]), "token 1 came twice and differs"),
    (decoded(0, [10, 12, 13]), "token 0 came twice and differs"),
    (decoded(2, [12, 13, 14]), "more than 4 tokens came"),
]


@pytest.mark.parametrize(("report", "message"), FAULTS)
def test_a_broken_report_fails_the_request(report: SequenceOutput, message: str) -> None:
    output, _ = an_output_of(attempt=1)
    output.accept(1, 0, [10, 11], RUNS)
    output.accept_decoded(report)
    assert error_of(output) == (ErrorKind.INTERNAL, f"attempt 1: {message}")
    before = list(output.emitted)
    output.accept(1, len(before), [19], STOP)
    output.accept_prompt_logprobs(1, a_run(1, -1))
    assert (output.emitted, output.ending) == (before, RUNS), "nothing counts after an error"
    assert error_of(output) == (ErrorKind.INTERNAL, f"attempt 1: {message}")


def test_logprobs_come_one_a_token() -> None:
    output, outbox = an_output_of(logprobs=True)
    output.accept_first_token(1, first_token(0, 10, logprobs=logprobs_message(-1)))
    reported = [logprobs_message(-1), logprobs_message(-2), logprobs_message(-3)]
    output.accept_decoded(decoded(0, [10, 11, 12], logprobs=reported))
    assert delivered(outbox).logprobs == serialised(-1, -2, -3)
    output.accept_decoded(decoded(3, [13]))
    assert error_of(output) == (ErrorKind.INTERNAL, "attempt 1: 1 tokens came with 0 logprobs")
    bare, _ = an_output_of(logprobs=True)
    bare.accept_first_token(1, first_token(0, 10))
    assert error_of(bare) == (ErrorKind.INTERNAL, "attempt 1: 1 tokens came with 0 logprobs")
    unasked, outbox = an_output_of()
    unasked.accept_first_token(1, first_token(0, 10, logprobs=logprobs_message(-1)))
    assert unasked.emitted == [10]
    assert delivered(outbox).logprobs == []


FAILED = Failure(kind=types_pb2.ErrorKind.ERROR_KIND_QUARANTINED, message="its GPU fails")


def test_a_failure_that_decode_reports_ends_the_attempt() -> None:
    output, _ = an_output_of()
    output.accept_decoded(decoded(0, [10], CANCELLED, failure=FAILED))
    assert isinstance(output.attempt_error, WorkerError)
    assert (output.attempt_error.kind, str(output.attempt_error)) == (
        ErrorKind.QUARANTINED,
        "decode: its GPU fails",
    )
    assert (output.error, output.ended_by_decode) == (None, True)


def test_what_was_seen_to_fail_before_counts_more_than_decodes_own_report() -> None:
    output, _ = an_output_of()
    lost = BatonError(ErrorKind.UNAVAILABLE, "gone")
    output.lose(lost)
    output.accept_decoded(decoded(0, [10], CANCELLED, failure=FAILED))
    assert output.attempt_error is lost


def test_the_first_error_of_an_attempt_counts() -> None:
    output, _ = an_output_of()
    first, second = BatonError(ErrorKind.UNAVAILABLE, "a"), BatonError(ErrorKind.UNAVAILABLE, "b")
    output.lose(first)
    output.lose(second)
    assert output.attempt_error is first


async def test_only_what_needs_a_decision_wakes_the_request() -> None:
    output, _ = an_output_of()

    async def woken() -> bool:
        waiting = asyncio.ensure_future(output.changed())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        done = waiting.done()
        waiting.cancel()
        return done

    output.accept_first_token(1, first_token(0, 10))
    assert not await woken(), "a token alone is delivered without the request's task"
    output.accept_decoded(decoded(1, [11], PREEMPTED))
    assert await woken()
    output.begin(2)
    output.lose(BatonError(ErrorKind.UNAVAILABLE, "gone"))
    assert await woken()
    output.begin(3)
    output.accept(3, 9, [1], RUNS)
    assert await woken()
    assert not await woken()
    echoed, _ = an_output_of(echo=True)
    echoed.accept_prompt_logprobs(1, a_run(1, -1))
    await asyncio.wait_for(echoed.changed(), 1)
