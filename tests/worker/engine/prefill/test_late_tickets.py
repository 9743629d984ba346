"""Prompts computed before their ticket arrives: replied to at once, handed over once it is there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.base.errors import ErrorKind
from baton.engine.shared_memory.output_ring import Finish
from baton.v1.decode_pb2 import Ticket
from baton.v1.engine_pb2 import CancelCommand
from baton.v1.prefill_pb2 import ProvideTicketRequest
from baton.v1.types_pb2 import Attempt, FinishReason
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve

ATTEMPT = Attempt(request_id=b"a" * 16, number=1)
LONG = 21  # three chunks
REST_S, LIMIT_S = 0.3, 10.0


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SteppedEngine]:
    made = SteppedEngine(tmp_path, "prefill")
    yield made
    made.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[SteppedEngine]:
    made = SteppedEngine(tmp_path, "decode")
    yield made
    made.close()


def play(*engines: SteppedEngine) -> None:
    """Turns the engines until none has had work for a while and no transfer runs: links have threads of their
    own."""
    deadline = time.monotonic() + LIMIT_S
    rested = time.monotonic() + REST_S
    while time.monotonic() < min(rested, deadline):
        busy = [one.play() or one.transfers > 0 for one in engines]
        if any(busy):
            rested = time.monotonic() + REST_S


def give(ticket: Ticket, number: int = 1) -> ProvideTicketRequest:
    attempt = Attempt(request_id=ATTEMPT.request_id, number=number)
    return ProvideTicketRequest(attempt=attempt, ticket=ticket)


@pytest.mark.parametrize("turns", [0, 1, 2, 5], ids=lambda turns: f"after {turns} turns")
def test_a_ticket_may_arrive_at_any_time(source: SteppedEngine, target: SteppedEngine, turns: int) -> None:
    number = source.send(prefill=prefill(None, tokens=LONG, ticket_follows=True))
    source.turn(turns)
    ticket = target.ask(reserve=reserve(tokens=LONG)).reserved.ticket
    assert source.ask(provide_ticket=give(ticket)).HasField("done")
    play(source, target)
    assert source.of(number) == ["prefill", "prefill", "prefill_ended"]
    first, handed_off = [e.prefill for e in source.events if e.id == number and e.HasField("prefill")]
    assert [r.finish for r in target.records] == [Finish.NONE] * 3 + [Finish.LENGTH]
    assert first.first_token.token_id == target.records[0].token
    assert handed_off.handed_off.bytes_shipped > 0
    assert 0 < handed_off.handed_off.exposed_ns < 60e9
    source.assert_free()
    target.assert_free()


def test_tokens_do_not_depend_on_when_the_ticket_arrives(
    source: SteppedEngine, target: SteppedEngine
) -> None:
    outputs = []
    for attempt, turns in enumerate((0, 6), 1):
        ask = prefill(None, tokens=LONG, attempt=Attempt(number=attempt), ticket_follows=True)
        number = source.send(prefill=ask)
        source.turn(turns)
        ticket = target.ask(reserve=reserve(attempt, tokens=LONG)).reserved.ticket
        source.send(provide_ticket=give(ticket, attempt))
        play(source, target)
        assert source.of(number)[-1] == "prefill_ended"
        outputs.append([record.token for record in target.records])
        target.records.clear()
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 4


def test_a_late_ticket_is_withdrawn_where_the_first_token_ended_the_request(
    source: SteppedEngine, target: SteppedEngine
) -> None:
    number = source.send(prefill=prefill(None, most=1, ticket_follows=True))
    play(source)
    assert source.of(number) == ["prefill"]  # it waits for the ticket, to release the slot
    (event,) = [e for e in source.events if e.id == number]
    assert event.prefill.first_token.finish_reason == FinishReason.FINISH_REASON_LENGTH
    source.ask(provide_ticket=give(target.ask(reserve=reserve(most=1)).reserved.ticket))
    play(source, target)
    assert source.of(number) == ["prefill", "prefill_ended"]
    source.assert_free()
    target.assert_free()


@pytest.mark.parametrize("turns", [0, 6])
def test_a_cancel_while_the_ticket_is_awaited_frees_everything(
    source: SteppedEngine, target: SteppedEngine, turns: int
) -> None:
    number = source.send(prefill=prefill(None, tokens=LONG, ticket_follows=True))
    source.turn(turns)
    source.ask(cancel=CancelCommand(attempt=ATTEMPT, prefill_only=True))
    assert source.failure(number)[0] is ErrorKind.CONFLICT
    source.assert_free()
    late = source.send(provide_ticket=give(target.ask(reserve=reserve(tokens=LONG)).reserved.ticket))
    source.turn()
    assert source.failure(late)[0] is ErrorKind.NOT_FOUND


def test_a_second_ticket_is_refused(source: SteppedEngine, target: SteppedEngine) -> None:
    source.send(prefill=prefill(None, tokens=LONG, ticket_follows=True))
    ticket = target.ask(reserve=reserve(tokens=LONG)).reserved.ticket
    source.ask(provide_ticket=give(ticket))
    again = source.send(provide_ticket=give(ticket))
    source.turn()
    assert source.failure(again)[0] is ErrorKind.NOT_FOUND
    play(source, target)
    target.run_out()
    source.assert_free()


def test_another_attempts_ticket_fails_the_prefill(source: SteppedEngine, target: SteppedEngine) -> None:
    number = source.send(prefill=prefill(None, tokens=LONG, ticket_follows=True))
    wrong = target.ask(reserve=reserve(tokens=LONG, name=b"b")).reserved.ticket
    given = source.send(provide_ticket=give(wrong))
    source.turn()
    assert source.failure(given)[0] is ErrorKind.CONFLICT
    assert source.failure(number) == source.failure(given)
    source.assert_free()


def test_a_ticket_and_ticket_follows_exclude_each_other(source: SteppedEngine, target: SteppedEngine) -> None:
    ticket = target.ask(reserve=reserve()).reserved.ticket
    number = source.send(prefill=prefill(ticket, ticket_follows=True))
    source.turn()
    assert source.failure(number)[0] is ErrorKind.INVALID
    source.assert_free()


def test_a_transfer_that_its_receiver_does_not_expect_is_retryable(
    source: SteppedEngine, target: SteppedEngine
) -> None:
    """The receiver's NOT_FOUND is about the transfer: the client's request is as good as before."""
    ticket = target.ask(reserve=reserve(tokens=LONG)).reserved.ticket
    target.ask(cancel=CancelCommand(attempt=ATTEMPT))
    number = source.send(prefill=prefill(ticket, tokens=LONG))
    play(source, target)
    kind, message = source.failure(number)
    assert kind is ErrorKind.UNAVAILABLE, message
    assert "does not expect this transfer" in message
