"""An engine of role both, turned by hand: reservations, tickets, bad input, and nothing leaked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from baton.engine.rings.heartbeat import UNKNOWN_STEP_S
from baton.engine.rings.output_ring import Finish
from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket, TicketBody, TicketState
from baton.v1.engine_pb2 import (
    AuditCommand,
    CancelCommand,
    HandoffStateCommand,
    SlotEndedCommand,
)
from baton.v1.types_pb2 import Attempt, FinishReason, Limits, Sampling
from services.worker.engine.decode.ticket_table import RUNNING_GRACE_S
from tests.worker.engine.stepped_engine import Turned, prefill, reserve


def test_a_request_goes_its_whole_way_and_leaves_nothing(turned: Turned) -> None:
    reserved = turned.ask(reserve=reserve()).reserved
    number = turned.send(prefill=prefill(reserved.ticket))
    turned.run_out()
    assert turned.of(number) == ["prefill", "prefill", "prefill_ended"]
    assert [r.finish for r in turned.records] == [Finish.NONE] * 3 + [Finish.LENGTH]
    assert {(r.slot, r.generation) for r in turned.records} == {(reserved.slot, reserved.generation)}
    first = next(e for e in turned.events if e.id == number).prefill.first_token
    assert (first.number, first.token_id) == (0, turned.records[0].token)
    turned.assert_free()


def test_reserving_twice_is_one_promise_and_a_higher_attempt_evicts_it(turned: Turned) -> None:
    first = turned.ask(reserve=reserve()).reserved
    assert turned.ask(reserve=reserve()).reserved == first
    second = turned.ask(reserve=reserve(2)).reserved
    assert second.ticket != first.ticket
    assert [e.ticket_ended.slot for e in turned.events if e.HasField("ticket_ended")] == [first.slot]
    late = turned.send(reserve=reserve(1))
    turned.turn()
    assert turned.failure(late)[0] is ErrorKind.CONFLICT
    turned.ask(cancel=CancelCommand(attempt=Attempt(request_id=b"a" * 16, number=2)))
    turned.assert_free()


def test_a_cancel_leaves_a_tombstone_for_a_late_reserve_and_a_late_commit(turned: Turned) -> None:
    attempt = Attempt(request_id=b"a" * 16, number=1)
    ticket = turned.ask(reserve=reserve()).reserved.ticket
    turned.ask(cancel=CancelCommand(attempt=attempt))
    turned.assert_free()
    late = [turned.send(reserve=reserve()), turned.send(prefill=prefill(ticket))]
    turned.turn()
    assert [turned.failure(number)[0] for number in late] == [ErrorKind.CONFLICT] * 2
    state = turned.ask(handoff_state=HandoffStateCommand(attempt=attempt)).handoff_state.state
    assert state == TicketState.TICKET_STATE_ENDED
    turned.assert_free()


def test_a_cancel_between_two_chunks_stops_the_prefill(turned: Turned) -> None:
    ticket = turned.ask(reserve=reserve(tokens=60)).reserved.ticket
    number = turned.send(prefill=prefill(ticket, tokens=60))
    turned.turn(2)
    turned.ask(cancel=CancelCommand(attempt=Attempt(request_id=b"a" * 16, number=1)))
    assert turned.failure(number)[0] is ErrorKind.CONFLICT
    turned.assert_free()
    assert turned.ask(audit=AuditCommand()).audit.prompt_tokens_run < 60


def test_a_ticket_that_expires_frees_everything(tmp_path: Path) -> None:
    turned = Turned(tmp_path)
    turned.ask(reserve=reserve(ttl=0))
    turned.turn()
    turned.assert_free()
    assert any(e.HasField("ticket_ended") for e in turned.events)
    turned.close()


def test_a_sequence_that_runs_ends_at_its_deadline(turned: Turned) -> None:
    """Though no router cancels it."""
    ticket = turned.ask(reserve=reserve(ttl=100, most=80)).reserved.ticket
    turned.send(prefill=prefill(ticket, most=80))
    while len(turned.records) < 3:
        turned.play()
    time.sleep(0.1 + RUNNING_GRACE_S)
    turned.run_out()
    assert [record.finish for record in turned.records[:3]] == [Finish.NONE] * 3
    assert turned.records[-1].finish is Finish.CANCELLED
    assert len(turned.records) < 80
    turned.assert_free()


def test_a_device_that_hangs_ends_the_engine(turned: Turned, monkeypatch: pytest.MonkeyPatch) -> None:
    for loop in (turned.engine._decode.loop, turned.engine._prefill.loop):
        with monkeypatch.context() as patch:
            patch.setattr(type(loop), "device_hung", lambda loop: True)
            with pytest.raises(BatonError, match="the device makes no progress") as hung:
                turned.turn()
            assert hung.value.kind is ErrorKind.UNAVAILABLE
    turned.turn()


def test_the_heartbeat_moves_with_every_turn_and_within_a_step(
    turned: Turned, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = [turned.heartbeat.read().turns]
    turned.turn()
    beats.append(turned.heartbeat.read().turns)
    turned.send(prefill=prefill(turned.ask(reserve=reserve()).reserved.ticket))
    expected: list[float] = []
    between = turned.engine._between_layers

    def watched() -> None:
        between()
        beat = turned.heartbeat.read()
        beats.append(beat.turns)
        expected.append(beat.expected_step_s)

    monkeypatch.setattr(turned.engine, "_between_layers", watched)
    turned.run_out()
    assert beats == sorted(set(beats))
    assert len(beats) > 2
    assert expected[0] == UNKNOWN_STEP_S, "a step that was never timed"
    assert 0 < expected[-1] < UNKNOWN_STEP_S
    assert turned.heartbeat.read().expected_step_s == 0


def test_a_full_worker_refuses_for_now_and_the_impossible_for_ever(turned: Turned) -> None:
    for name in (b"a", b"b"):
        turned.ask(reserve=reserve(name=name))
    full = turned.send(reserve=reserve(name=b"c"))
    longest, too_long, huge = (turned.send(reserve=reserve(name=b"d", tokens=n)) for n in (125, 126, 510))
    with structlog.testing.capture_logs() as logged:
        turned.turn()
    # A router repeats what it was refused for want of room many times a second.
    assert [line["log_level"] for line in logged if line["event"] == "command_refused"] == [
        "debug", "debug", "warning", "warning",
    ]  # fmt: skip
    assert turned.failure(full)[0] is ErrorKind.OVERLOADED
    assert turned.failure(longest)[0] is ErrorKind.OVERLOADED  # 128 tokens of KV: all 32 blocks
    assert turned.failure(too_long)[0] is ErrorKind.INVALID
    assert turned.failure(huge)[0] is ErrorKind.INVALID


def test_a_first_token_that_ends_the_request_releases_the_ticket(turned: Turned) -> None:
    ticket = turned.ask(reserve=reserve()).reserved.ticket
    probe = turned.send(prefill=prefill(ticket))
    turned.run_out()
    token = next(e for e in turned.events if e.id == probe).prefill.first_token.token_id
    again = turned.ask(reserve=reserve(name=b"b")).reserved.ticket
    limits = Limits(stop_token_ids=[token])
    number = turned.send(prefill=prefill(again, name=b"b", limits=limits))
    turned.run_out()
    assert turned.of(number) == ["prefill", "prefill_ended"]
    event = next(e for e in turned.events if e.id == number)
    assert event.prefill.first_token.finish_reason == FinishReason.FINISH_REASON_STOP
    turned.assert_free()


def test_a_ticket_is_spent_once(turned: Turned) -> None:
    ticket = turned.ask(reserve=reserve(most=20)).reserved.ticket
    turned.send(prefill=prefill(ticket, most=20))
    turned.turn(4)  # active by now
    again = turned.send(prefill=prefill(ticket, most=20))
    turned.run_out()
    assert turned.failure(again)[0] is ErrorKind.CONFLICT
    assert len(turned.records) == 20
    turned.assert_free()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"token_ids": [97]}, ErrorKind.INVALID),
        ({"prompt_length": 10}, ErrorKind.INVALID),
        ({"limits": Limits(stop_token_ids=[2**32 - 1])}, ErrorKind.INVALID),
        ({"limits": Limits(stop_token_ids=range(9))}, ErrorKind.INVALID),
        ({"limits": Limits(max_tokens=100_000)}, ErrorKind.INVALID),
        ({"limits": Limits(max_tokens=5)}, ErrorKind.CONFLICT),  # not what was reserved
        ({"sampling": Sampling(temperature=float("nan"))}, ErrorKind.INVALID),
        ({"sampling": Sampling(top_p=1.5)}, ErrorKind.INVALID),
        ({"ticket": Ticket(body=b"\xff garbage")}, ErrorKind.INVALID),
        ({"ticket": Ticket(signature=b"forged")}, ErrorKind.FORBIDDEN),
        ({"attempt": Attempt(number=2)}, ErrorKind.CONFLICT),
    ],
    ids=lambda value: str(value).replace("\n", " "),
)
def test_a_bad_prefill_is_refused_and_the_engine_lives_on(
    turned: Turned, fields: dict[str, Any], kind: ErrorKind
) -> None:
    ticket = turned.ask(reserve=reserve()).reserved.ticket
    number = turned.send(prefill=prefill(ticket, **fields))
    turned.run_out()
    assert turned.failure(number)[0] is kind
    turned.ask(cancel=CancelCommand(attempt=Attempt(request_id=b"a" * 16, number=1)))
    turned.assert_free()
    good = turned.ask(reserve=reserve(name=b"z")).reserved.ticket
    turned.send(prefill=prefill(good, name=b"z"))
    turned.run_out()
    assert len(turned.records) == 4


def test_a_ticket_whose_blocks_do_not_fit_the_prompt_is_refused(turned: Turned) -> None:
    ticket = turned.ask(reserve=reserve()).reserved.ticket
    body = TicketBody.FromString(ticket.body)
    body.block_counts[0] -= 1
    number = turned.send(prefill=prefill(Ticket(body=body.SerializeToString(), signature=ticket.signature)))
    turned.turn()
    assert turned.failure(number)[0] in (ErrorKind.CONFLICT, ErrorKind.FORBIDDEN)


def test_an_unknown_slot_that_ended_is_counted(turned: Turned) -> None:
    turned.send(slot_ended=SlotEndedCommand(slot=1, generation=77))
    turned.turn()
    assert turned.ask(audit=AuditCommand()).audit.dropped_unknown == 1
    turned.assert_free()


def test_a_reservation_does_not_wait_for_the_end_of_a_step(
    turned: Turned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked between two layers is answered there, but for what came behind another command."""
    ticket = turned.ask(reserve=reserve()).reserved.ticket
    turned.send(prefill=prefill(ticket))
    loop = turned.engine._decode.loop
    while not loop.has_work:
        turned.engine.turn()
    between = turned.engine._between_layers
    asked: list[int] = []

    def ask_once() -> None:
        if not asked:
            asked.append(turned.send(reserve=reserve(name=b"b")))
            asked.append(turned.send(audit=AuditCommand()))
            asked.append(turned.send(reserve=reserve(name=b"c")))
            steps = turned.ring.steps
            between()
            turned._read()
            assert turned.ring.steps == steps
            assert [turned.of(number) for number in asked] == [["reserved"], [], []]

    monkeypatch.setattr(turned.engine, "_between_layers", ask_once)
    turned.run_out()
    assert [turned.of(number) for number in asked] == [["reserved"], ["audit"], ["failed"]]
    assert turned.failure(asked[2])[0] is ErrorKind.OVERLOADED
    turned.ask(cancel=CancelCommand(attempt=Attempt(request_id=b"b" * 16, number=1)))
    turned.assert_free()
