"""The sampler through an engine's tickets, handoffs and later attempts; prompts run for their logprobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.base.errors import ErrorKind
from baton.v1.decode_pb2 import Ticket
from baton.v1.engine_pb2 import CancelCommand
from baton.v1.prefill_pb2 import PrefillRequest
from baton.v1.types_pb2 import Attempt, Limits, LogitBias, Logprobs, Sampling
from services.common.engine.logprobs import logprobs_message
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve

PROMPT = 9
MOST = 16
EVERYTHING = Sampling(
    temperature=0.9,
    top_k=60,
    top_p=0.99,
    min_p=0.01,
    seed=5,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias=[LogitBias(token_id=token, bias=1.5) for token in range(40)],
    logprobs=3,
)
LIMITS = Limits(max_tokens=MOST, stop_token_ids=range(20, 28), min_tokens=12)
ATTEMPT = Attempt(request_id=b"a" * 16, number=1)
Output = list[tuple[int, Logprobs | None]]


def run(stepped: SteppedEngine, name: bytes, emitted: list[int], sampling: Sampling) -> Output:
    """Runs one attempt; its output in the ring."""
    stepped.records.clear()
    command = reserve(name=name, tokens=PROMPT + len(emitted), most=MOST)
    command.first_number = len(emitted)
    reserved = stepped.ask(reserve=command).reserved
    message = prefill(reserved.ticket, name=name, tokens=PROMPT)
    message.token_ids.extend(emitted)
    message.sampling.CopyFrom(sampling)
    message.limits.CopyFrom(LIMITS)
    number = stepped.send(prefill=message)
    stepped.run_out()
    first = next(e for e in stepped.events if e.id == number).prefill.first_token
    assert first.number == len(emitted)
    output = [
        (r.token, None if r.logprobs is None else logprobs_message(r.logprobs)) for r in stepped.records
    ]
    # The first token is reported twice, by prefill's reply and by the slot's first record.
    assert output[0] == (first.token_id, first.logprobs if first.HasField("logprobs") else None)
    return output


def tokens_of(output: Output) -> list[int]:
    return [token for token, _ in output]


def test_all_parameters_survive_the_handoff_and_a_second_attempt(tmp_path: Path) -> None:
    stepped = SteppedEngine(tmp_path)
    whole = run(stepped, b"a", [], EVERYTHING)
    assert len(whole) >= LIMITS.min_tokens
    for cut in (1, 5, LIMITS.min_tokens - 2):
        rest = run(stepped, bytes([cut]), tokens_of(whole)[:cut], EVERYTHING)
        assert tokens_of(rest) == tokens_of(whole)[cut:]
        for (_, again), (_, before) in zip(rest, whole[cut:], strict=True):
            assert again is not None
            assert before is not None
            assert again.logprob == pytest.approx(before.logprob, rel=1e-6)
            assert [t.token_id for t in again.top] == [t.token_id for t in before.top]
    stepped.assert_free()
    stepped.close()


@pytest.mark.parametrize(
    "strong",
    [
        Sampling(top_p=1, repetition_penalty=3),
        Sampling(top_p=1, presence_penalty=-2),
        Sampling(top_p=1, frequency_penalty=-2),
        Sampling(top_p=1, logit_bias=[LogitBias(token_id=50, bias=100)]),
    ],
    ids=lambda sampling: str(sampling).replace("\n", " "),
)
def test_each_parameter_affects_tokens_after_the_first(stepped: SteppedEngine, strong: Sampling) -> None:
    with_it = run(stepped, b"a", [], strong)
    assert tokens_of(with_it)[1:] != tokens_of(run(stepped, b"b", [], Sampling(top_p=1)))[1:]
    assert all(logprobs is None for _, logprobs in with_it)


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_long_prompts_logprobs_come_in_bounded_messages_before_all_else(
    tmp_path: Path, max_tokens: int
) -> None:
    stepped = SteppedEngine(tmp_path, kv_blocks=256, chunk_tokens=50)
    request = PrefillRequest(
        attempt=ATTEMPT,
        token_ids=[n % 97 for n in range(300)],
        prompt_length=300,
        sampling=Sampling(top_p=1, logprobs=2),
        limits=Limits(max_tokens=max_tokens),
        prompt_logprobs=True,
    )
    if max_tokens:
        command = reserve(tokens=300, most=max_tokens)
        request.ticket.CopyFrom(stepped.ask(reserve=command).reserved.ticket)
    command = prefill(Ticket())
    command.CopyFrom(request)
    number = stepped.send(prefill=command)
    stepped.run_out()
    events = [event for event in stepped.events if event.id == number]
    reported = [event.prefill.prompt_logprobs for event in events[:2]]
    assert [(one.first_position, len(one.logprobs)) for one in reported] == [(1, 256), (257, 43)]
    assert all(len(one.top) == 2 and one.logprob < 0 for message in reported for one in message.logprobs)
    rest = [event.prefill.WhichOneof("event") or event.WhichOneof("event") for event in events[2:]]
    assert rest == (["first_token", "handed_off", "prefill_ended"] if max_tokens else ["prefill_ended"])
    assert len(stepped.records) == max_tokens
    stepped.assert_free()
    stepped.close()


def test_a_prompt_computed_for_its_logprobs_can_be_cancelled(stepped: SteppedEngine) -> None:
    command = prefill(Ticket(), tokens=60, most=0, prompt_logprobs=True)
    command.ClearField("ticket")
    number = stepped.send(prefill=command)
    stepped.turn(2)
    stepped.ask(cancel=CancelCommand(attempt=ATTEMPT))
    assert stepped.failure(number)[0] is ErrorKind.CONFLICT
    stepped.assert_free()


def test_a_request_for_no_tokens_with_a_ticket_is_refused(stepped: SteppedEngine) -> None:
    ticket = stepped.ask(reserve=reserve()).reserved.ticket
    with_ticket = stepped.send(prefill=prefill(ticket, most=0))
    command = prefill(Ticket(), most=0)
    command.ClearField("ticket")
    command.prompt_length -= 1
    with_output = stepped.send(prefill=command)
    stepped.run_out()
    for number in (with_ticket, with_output):
        assert stepped.failure(number)[0] is ErrorKind.INVALID
    stepped.ask(cancel=CancelCommand(attempt=ATTEMPT))
    stepped.assert_free()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(min_p=2),
        Sampling(repetition_penalty=-1),
        Sampling(logit_bias=[LogitBias(token_id=97)]),
    ],
    ids=lambda sampling: str(sampling).replace("\n", " "),
)
def test_invalid_parameters_are_refused_and_the_engine_continues(
    stepped: SteppedEngine, sampling: Sampling
) -> None:
    ticket = stepped.ask(reserve=reserve()).reserved.ticket
    number = stepped.send(prefill=prefill(ticket, sampling=sampling))
    stepped.run_out()
    assert stepped.failure(number)[0] is ErrorKind.INVALID
    stepped.ask(cancel=CancelCommand(attempt=ATTEMPT))
    stepped.assert_free()
