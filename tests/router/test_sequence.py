"""What the router makes of two streams that report one output: what it keeps, drops, and faults on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import SequenceOutput
from baton.v1.prefill_pb2 import FirstToken, PromptLogprobs
from baton.v1.types_pb2 import Attempt, FinishReason, Sampling
from services.router.request.output_state import Sequence
from services.router.request.request import Echo, Request
from tests.router.scripted_workers import REQUEST_ID, logprobs_message

PROMPT = (1, 2, 3, 4, 5)
RUNS = FinishReason.FINISH_REASON_UNSPECIFIED
STOP = FinishReason.FINISH_REASON_STOP
LENGTH = FinishReason.FINISH_REASON_LENGTH
MOVED = FinishReason.FINISH_REASON_PREEMPTED
CANCELLED = FinishReason.FINISH_REASON_CANCELLED
# A sequence's public state as an attempt begins.
FRESH: dict[str, Any] = {
    "emitted": [],
    "ending": RUNS,
    "fault": None,
    "lost": None,
    "followed": False,
    "ended_by_decode": False,
    "decoding": False,
    "reserved": False,
    "cached_tokens": None,
}


def a_sequence(*, logprobs: bool = False, echo: bool = False, attempt: int = 1) -> Sequence:
    """Of a request for four tokens after a prompt of five."""
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
    )
    sequence = Sequence(request)
    if attempt:
        sequence.begin(attempt)
    return sequence


def state(sequence: Sequence) -> dict[str, Any]:
    return {name: getattr(sequence, name) for name in FRESH}


def fault(sequence: Sequence) -> tuple[ErrorKind, str]:
    assert sequence.fault is not None
    return sequence.fault.kind, str(sequence.fault)


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


def test_before_the_first_attempt() -> None:
    sequence = a_sequence(attempt=0)
    assert state(sequence) == FRESH
    assert (sequence.attempt, sequence.prompt_told, list(sequence.logprobs)) == (0, True, [])
    assert sequence.take_prompt_logprobs() == []


def test_an_attempt_begins_afresh_and_keeps_what_was_emitted() -> None:
    sequence = a_sequence()
    sequence.accept_first(1, first_token(0, 10, cached_tokens=2))
    sequence.accept_decoded(decoded(1, [11], MOVED))
    sequence.reserved = True
    sequence.lose(BatonError(ErrorKind.UNAVAILABLE, "gone"))
    sequence.begin(2)
    assert state(sequence) == {**FRESH, "emitted": [10, 11], "cached_tokens": 2}
    assert sequence.attempt == 2


def test_what_was_emitted_goes_where_the_prompts_logprobs_are_missing() -> None:
    """The prompt is run once more, and nothing was shown: so the output begins anew."""
    sequence = a_sequence(echo=True)
    sequence.accept_decoded(decoded(0, [10], logprobs=[logprobs_message(-1)]))
    sequence.begin(2)
    assert state(sequence) == FRESH
    assert not sequence.logprobs
    sequence.accept_prompt(2, a_run(1, -1, -2, -3, -4))
    sequence.accept_decoded(decoded(0, [10], attempt=2, logprobs=[logprobs_message(-1)]))
    sequence.begin(3)
    assert sequence.emitted == [10]
    assert list(sequence.logprobs) == serialised(-1)


@pytest.mark.parametrize("by", ["prefill", "decode", "prompt"])
def test_another_attempts_reports_change_nothing(by: str) -> None:
    sequence = a_sequence(echo=by == "prompt", attempt=3)
    heard: list[None] = []
    sequence.on_tokens = lambda: heard.append(None)
    for attempt in (2, 4):
        if by == "prefill":
            sequence.accept_first(attempt, first_token(0, 10, finish_reason=STOP, cached_tokens=2))
        elif by == "decode":
            sequence.accept_decoded(decoded(0, [10], STOP, attempt))
        else:
            sequence.accept_first(attempt, first_token(0, 10))
            sequence.accept_prompt(attempt, a_run(1, -1, -2, -3, -4))
            assert not sequence.prompt_told
    assert state(sequence) == FRESH
    assert not heard


def test_without_a_listener_tokens_are_kept_all_the_same() -> None:
    sequence = a_sequence()
    sequence.accept_first(1, first_token(0, 10))
    assert sequence.emitted == [10]


# (cached tokens said, token number) -> what is kept.
CACHED = [(2, 0, 2), (0, 0, 0), (5, 0, 5), (7, 0, 5), (3, 1, None)]


@pytest.mark.parametrize(("said", "number", "kept"), CACHED)
def test_cached_tokens_are_those_of_the_prompts_first_run(said: int, number: int, kept: int | None) -> None:
    """A later attempt finds what earlier ones computed: that was no saving. Nor is there more than the
    prompt has."""
    sequence = a_sequence()
    sequence.accept(1, 0, [9] * number, RUNS)
    sequence.accept_first(1, first_token(number, 10, cached_tokens=said))
    assert sequence.cached_tokens == kept
    assert sequence.emitted == [9] * number + [10]


def test_prefills_token_may_end_the_output() -> None:
    sequence = a_sequence()
    sequence.accept_first(1, first_token(0, 10, finish_reason=STOP))
    assert state(sequence) == {**FRESH, "emitted": [10], "ending": STOP, "cached_tokens": 0}


# What decode's stream says in turn -> emitted, ending, followed, ended by decode, decoding.
DECODED: list[tuple[list[SequenceOutput], tuple[Any, ...]]] = [
    ([decoded(0, [10])], ([10], RUNS, True, False, False)),
    ([decoded(0, [10, 11])], ([10, 11], RUNS, True, False, True)),
    ([decoded(1, [11])], ([10, 11], RUNS, True, False, True)),
    ([decoded(1, [11]), decoded(0, [10, 11, 12])], ([10, 11, 12], RUNS, True, False, True)),
    ([decoded(1, [11, 12]), decoded(1, [11])], ([10, 11, 12], RUNS, True, False, True)),
    ([decoded(1, [11, 12, 13], LENGTH)], ([10, 11, 12, 13], LENGTH, True, True, True)),
    ([decoded(1, [11], MOVED), decoded(1, [11])], ([10, 11], MOVED, True, True, True)),
    ([decoded(1, [11]), decoded(2, [], MOVED)], ([10, 11], MOVED, True, True, True)),
    ([decoded(1, [11], STOP), decoded(2, [], CANCELLED)], ([10, 11], STOP, True, True, True)),
    ([decoded(1, [11], LENGTH), decoded(2, [], CANCELLED)], ([10, 11], LENGTH, True, True, True)),
    ([decoded(1, [], CANCELLED), decoded(1, [11], STOP)], ([10, 11], STOP, True, True, True)),
    # A reservation that ended unused.
    ([decoded(1, [], CANCELLED)], ([10], CANCELLED, False, True, False)),
]


@pytest.mark.parametrize(("outputs", "expected"), DECODED)
def test_decodes_stream_goes_on_after_prefills_token(
    outputs: list[SequenceOutput], expected: tuple[Any, ...]
) -> None:
    sequence = a_sequence()
    sequence.accept_first(1, first_token(0, 10, cached_tokens=1))
    for output in outputs:
        sequence.accept_decoded(output)
    emitted, ending, followed, ended_by_decode, decoding = expected
    assert state(sequence) == {
        **FRESH,
        "emitted": emitted,
        "ending": ending,
        "followed": followed,
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


@pytest.mark.parametrize(("output", "message"), FAULTS)
def test_a_broken_report_fails_the_request(output: SequenceOutput, message: str) -> None:
    sequence = a_sequence(attempt=1)
    sequence.accept(1, 0, [10, 11], RUNS)
    sequence.accept_decoded(output)
    assert fault(sequence) == (ErrorKind.INTERNAL, f"attempt 1: {message}")
    before = list(sequence.emitted)
    sequence.accept(1, len(before), [19], STOP)
    sequence.accept_prompt(1, a_run(1, -1))
    assert (sequence.emitted, sequence.ending) == (before, RUNS), "nothing counts after a fault"
    assert fault(sequence) == (ErrorKind.INTERNAL, f"attempt 1: {message}")


def test_logprobs_come_one_a_token() -> None:
    sequence = a_sequence(logprobs=True)
    sequence.accept_first(1, first_token(0, 10, logprobs=logprobs_message(-1)))
    told = [logprobs_message(-1), logprobs_message(-2), logprobs_message(-3)]
    sequence.accept_decoded(decoded(0, [10, 11, 12], logprobs=told))
    assert list(sequence.logprobs) == serialised(-1, -2, -3)
    sequence.accept_decoded(decoded(3, [13]))
    assert fault(sequence) == (ErrorKind.INTERNAL, "attempt 1: 1 tokens came with 0 logprobs")
    bare = a_sequence(logprobs=True)
    bare.accept_first(1, first_token(0, 10))
    assert fault(bare) == (ErrorKind.INTERNAL, "attempt 1: 1 tokens came with 0 logprobs")
    unasked = a_sequence()
    unasked.accept_first(1, first_token(0, 10, logprobs=logprobs_message(-1)))
    assert (unasked.emitted, list(unasked.logprobs)) == ([10], [])


def test_the_prompts_logprobs_come_in_order_and_once() -> None:
    sequence = a_sequence(echo=True)
    heard: list[None] = []
    sequence.on_tokens = lambda: heard.append(None)
    sequence.accept_prompt(1, a_run(1, -1))
    sequence.accept_prompt(1, a_run(2, -2, -3))
    sequence.begin(2)
    sequence.accept_prompt(2, a_run(1, -1, -2))  # told by the first attempt already
    sequence.accept_prompt(2, a_run(2, -2, -3))
    assert not sequence.prompt_told
    sequence.accept_decoded(decoded(0, [10], attempt=2, logprobs=[logprobs_message(-9)]))
    assert len(heard) == 1
    sequence.accept_prompt(2, a_run(3, -3))
    assert len(heard) == 1, "the tokens wait for all of the prompt"
    sequence.accept_prompt(2, a_run(3, -3, -4))
    assert sequence.prompt_told
    assert len(heard) == 2, "the tokens that waited may be shown now"
    assert sequence.take_prompt_logprobs() == serialised(-1, -2, -3, -4)
    assert sequence.take_prompt_logprobs() == []
    assert sequence.fault is None


def test_the_last_of_the_prompt_shows_nothing_where_no_token_waits() -> None:
    sequence = a_sequence(echo=True)
    heard: list[None] = []
    sequence.on_tokens = lambda: heard.append(None)
    sequence.accept_prompt(1, a_run(1, -1, -2, -3, -4))
    assert (sequence.prompt_told, heard) == (True, [])


# After one of the prompt's four logprobs: the next run -> what is wrong with it.
PROMPT_FAULTS = [
    (a_run(3, -3), "the prompt's logprobs 1 to 1 never came"),
    (a_run(5, -3), "the prompt's logprobs 1 to 3 never came"),
    (a_run(2, -2, -3, -4, -5), "more than 4 logprobs of the prompt came"),
]


@pytest.mark.parametrize(("run", "message"), PROMPT_FAULTS)
def test_a_broken_report_of_the_prompt_fails_the_request(run: PromptLogprobs, message: str) -> None:
    sequence = a_sequence(echo=True)
    sequence.accept_prompt(1, a_run(1, -1))
    sequence.accept_prompt(1, run)
    assert fault(sequence) == (ErrorKind.INTERNAL, f"attempt 1: {message}")


def test_the_prompts_first_token_has_no_logprobs() -> None:
    sequence = a_sequence(echo=True)
    sequence.accept_prompt(1, a_run(0, -1))
    assert fault(sequence)[0] is ErrorKind.INTERNAL


def test_a_token_of_prefill_before_all_of_the_prompt_is_a_fault() -> None:
    sequence = a_sequence(echo=True)
    sequence.accept_prompt(1, a_run(1, -1, -2, -3))
    sequence.accept_first(1, first_token(0, 10, logprobs=logprobs_message(-1)))
    message = "attempt 1: a token came before all of the prompt's logprobs"
    assert fault(sequence) == (ErrorKind.INTERNAL, message)
    assert sequence.emitted == []


def test_the_first_loss_counts() -> None:
    sequence = a_sequence()
    first, second = BatonError(ErrorKind.UNAVAILABLE, "a"), BatonError(ErrorKind.UNAVAILABLE, "b")
    sequence.lose(first)
    sequence.lose(second)
    assert sequence.lost is first


async def test_only_what_is_to_be_judged_wakes_the_request() -> None:
    sequence = a_sequence()

    async def woken() -> bool:
        waiting = asyncio.ensure_future(sequence.changed())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        done = waiting.done()
        waiting.cancel()
        return done

    sequence.accept_first(1, first_token(0, 10))
    assert not await woken(), "a token alone is shown without the request's task"
    sequence.accept_decoded(decoded(1, [11], MOVED))
    assert await woken()
    sequence.begin(2)
    sequence.lose(BatonError(ErrorKind.UNAVAILABLE, "gone"))
    assert await woken()
    sequence.begin(3)
    sequence.accept(3, 9, [1], RUNS)
    assert await woken()
    assert not await woken()
    echoed = a_sequence(echo=True)
    echoed.accept_prompt(1, a_run(1, -1))
    await asyncio.wait_for(echoed.changed(), 1)
