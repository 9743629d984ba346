"""A stepped engine of role both: reservations, tickets, invalid input, and nothing leaked."""

from __future__ import annotations

import re
import select
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.parallel.exchange import ExchangeTimeout, ExchangeTimeoutError
from baton.engine.shared_memory.heartbeat import UNKNOWN_STEP_S
from baton.engine.shared_memory.output_ring import Finish
from baton.engine.step_times import RecentSteps
from baton.perf_model.curve import Curve
from baton.perf_model.decode_fit import DecodeFit
from baton.perf_model.messages import from_message
from baton.perf_model.step_costs import StepCosts
from baton.v1.decode_pb2 import GetHandoffRequest, Ticket, TicketBody, TicketState
from baton.v1.engine_pb2 import CancelCommand, SlotEndedCommand
from baton.v1.types_pb2 import Attempt, FinishReason, Limits, Sampling
from baton.v1.worker_pb2 import GetAuditRequest
from services.worker.engine.decode.ticket_table import RUNNING_GRACE_S
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve


def test_a_request_completes_and_frees_everything(stepped: SteppedEngine) -> None:
    reserved = stepped.ask(reserve=reserve()).reserved
    number = stepped.send(prefill=prefill(reserved.ticket))
    stepped.run_out()
    assert stepped.of(number) == ["prefill", "prefill", "prefill_ended"]
    assert [r.finish for r in stepped.records] == [Finish.NONE] * 3 + [Finish.LENGTH]
    assert {(r.slot, r.generation) for r in stepped.records} == {(reserved.slot, reserved.generation)}
    first = next(e for e in stepped.events if e.id == number).prefill.first_token
    assert (first.number, first.token_id) == (0, stepped.records[0].token)
    stepped.assert_free()


def test_reserving_is_idempotent_and_a_higher_attempt_supersedes(stepped: SteppedEngine) -> None:
    first = stepped.ask(reserve=reserve()).reserved
    assert stepped.ask(reserve=reserve()).reserved == first
    second = stepped.ask(reserve=reserve(2)).reserved
    assert second.ticket != first.ticket
    assert [e.ticket_ended.slot for e in stepped.events if e.HasField("ticket_ended")] == [first.slot]
    late = stepped.send(reserve=reserve(1))
    stepped.turn()
    assert stepped.failure(late)[0] is ErrorKind.CONFLICT
    stepped.ask(cancel=CancelCommand(attempt=Attempt(request_id=b"a" * 16, number=2)))
    stepped.assert_free()


def test_a_cancel_leaves_a_tombstone_for_a_late_reserve_and_a_late_commit(stepped: SteppedEngine) -> None:
    attempt = Attempt(request_id=b"a" * 16, number=1)
    ticket = stepped.ask(reserve=reserve()).reserved.ticket
    stepped.ask(cancel=CancelCommand(attempt=attempt))
    stepped.assert_free()
    late = [stepped.send(reserve=reserve()), stepped.send(prefill=prefill(ticket))]
    stepped.turn()
    assert [stepped.failure(number)[0] for number in late] == [ErrorKind.CONFLICT] * 2
    state = stepped.ask(handoff_state=GetHandoffRequest(attempt=attempt)).handoff_state.state
    assert state == TicketState.TICKET_STATE_ENDED
    stepped.assert_free()


def test_a_cancel_between_two_chunks_stops_the_prefill(stepped: SteppedEngine) -> None:
    ticket = stepped.ask(reserve=reserve(tokens=60)).reserved.ticket
    number = stepped.send(prefill=prefill(ticket, tokens=60))
    stepped.turn(2)
    stepped.ask(cancel=CancelCommand(attempt=Attempt(request_id=b"a" * 16, number=1)))
    assert stepped.failure(number)[0] is ErrorKind.CONFLICT
    stepped.assert_free()
    assert stepped.ask(report=GetAuditRequest()).report.prompt_tokens_run < 60


def test_a_ticket_that_expires_frees_everything(tmp_path: Path) -> None:
    stepped = SteppedEngine(tmp_path)
    stepped.ask(reserve=reserve(ttl=0))
    stepped.turn()
    stepped.assert_free()
    assert any(e.HasField("ticket_ended") for e in stepped.events)
    stepped.close()


def test_a_running_sequence_ends_at_its_deadline(stepped: SteppedEngine) -> None:
    """Even if no router cancels it."""
    ticket = stepped.ask(reserve=reserve(ttl=1000, most=80)).reserved.ticket
    stepped.send(prefill=prefill(ticket, most=80))
    while len(stepped.records) < 3:  # within the deadline, on a busy machine too
        stepped.play()
    time.sleep(1 + RUNNING_GRACE_S)
    stepped.run_out()
    assert [record.finish for record in stepped.records[:3]] == [Finish.NONE] * 3
    assert stepped.records[-1].finish is Finish.CANCELLED
    assert len(stepped.records) < 80
    stepped.assert_free()


def test_a_device_that_hangs_ends_the_engine(stepped: SteppedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for loop in (stepped.engine.decode.loop, stepped.engine.prefill.steps):
        with monkeypatch.context() as patch:
            patch.setattr(type(loop), "device_hung", lambda loop: True)
            with pytest.raises(BatonError, match="the device makes no progress") as hung:
                stepped.turn()
            assert hung.value.kind is ErrorKind.UNAVAILABLE
    stepped.turn()


def test_a_device_that_waited_for_another_in_vain_ends_the_engine(
    stepped: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout = ExchangeTimeoutError(
        ExchangeTimeout(1, 0, 7, 4, layer=1, waited_s=2.0, peer_step=7, peer_node=3)
    )

    def waited(loop: DecodeLoop) -> bool:
        raise timeout

    with monkeypatch.context() as patch:
        patch.setattr(type(stepped.engine.decode.loop), "device_hung", waited)
        with pytest.raises(BatonError, match=re.escape(str(timeout))) as hung:
            stepped.turn()
    assert (hung.value.kind, hung.value.cause) == (ErrorKind.UNAVAILABLE, FailureCause.EXCHANGE)
    stepped.turn()


def test_the_heartbeat_moves_with_every_turn_and_within_a_step(
    stepped: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = [stepped.heartbeat.read().turns]
    stepped.turn()
    beats.append(stepped.heartbeat.read().turns)
    stepped.send(prefill=prefill(stepped.ask(reserve=reserve()).reserved.ticket))
    expected: list[float] = []
    steps = stepped.engine.steps
    step_decode = steps.step_decode

    def step(between_layers: Callable[[], None]) -> Any:
        def watched() -> None:
            between_layers()
            beat = stepped.heartbeat.read()
            beats.append(beat.turns)
            expected.append(beat.expected_step_s)

        return step_decode(watched)

    monkeypatch.setattr(steps, "step_decode", step)
    stepped.run_out()
    assert beats == sorted(set(beats))
    assert len(beats) > 2
    assert expected[0] == UNKNOWN_STEP_S, "a step that was never timed"
    assert 0 < expected[-1] < UNKNOWN_STEP_S
    assert stepped.heartbeat.read().expected_step_s == 0


def test_a_full_worker_is_overloaded_and_an_impossible_request_is_for_another(stepped: SteppedEngine) -> None:
    for name in (b"a", b"b"):
        stepped.ask(reserve=reserve(name=name))
    full = stepped.send(reserve=reserve(name=b"c"))
    longest, too_long, huge = (stepped.send(reserve=reserve(name=b"d", tokens=n)) for n in (125, 126, 510))
    with structlog.testing.capture_logs() as logged:
        stepped.turn()
    # A router repeats a reservation that was refused for lack of room many times a second.
    assert [line["log_level"] for line in logged if line["event"] == "command_refused"] == [
        "debug", "debug", "warning", "warning",
    ]  # fmt: skip
    assert stepped.failure(full)[0] is ErrorKind.OVERLOADED
    assert stepped.failure(longest)[0] is ErrorKind.OVERLOADED  # 128 tokens of KV: all 32 blocks
    assert stepped.failure(too_long)[0] is ErrorKind.CONFLICT
    assert stepped.failure(huge)[0] is ErrorKind.CONFLICT


def test_a_first_token_that_ends_the_request_releases_the_ticket(stepped: SteppedEngine) -> None:
    ticket = stepped.ask(reserve=reserve()).reserved.ticket
    probe = stepped.send(prefill=prefill(ticket))
    stepped.run_out()
    token = next(e for e in stepped.events if e.id == probe).prefill.first_token.token_id
    again = stepped.ask(reserve=reserve(name=b"b")).reserved.ticket
    limits = Limits(stop_token_ids=[token])
    number = stepped.send(prefill=prefill(again, name=b"b", limits=limits))
    stepped.run_out()
    assert stepped.of(number) == ["prefill", "prefill_ended"]
    event = next(e for e in stepped.events if e.id == number)
    assert event.prefill.first_token.finish_reason == FinishReason.FINISH_REASON_STOP
    stepped.assert_free()


def test_a_ticket_is_spent_once(stepped: SteppedEngine) -> None:
    ticket = stepped.ask(reserve=reserve(most=20)).reserved.ticket
    stepped.send(prefill=prefill(ticket, most=20))
    stepped.turn(4)  # active by now
    again = stepped.send(prefill=prefill(ticket, most=20))
    stepped.run_out()
    assert stepped.failure(again)[0] is ErrorKind.CONFLICT
    assert len(stepped.records) == 20
    stepped.assert_free()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"token_ids": [97]}, ErrorKind.INVALID),
        ({"prompt_length": 10}, ErrorKind.INVALID),
        ({"limits": Limits(stop_token_ids=[2**32 - 1])}, ErrorKind.INVALID),
        ({"limits": Limits(stop_token_ids=range(9))}, ErrorKind.INVALID),
        ({"limits": Limits(max_tokens=100_000)}, ErrorKind.CONFLICT),
        ({"limits": Limits(max_tokens=5)}, ErrorKind.CONFLICT),  # not what was reserved
        ({"sampling": Sampling(temperature=float("nan"))}, ErrorKind.INVALID),
        ({"sampling": Sampling(top_p=1.5)}, ErrorKind.INVALID),
        ({"ticket": Ticket(body=b"\xff garbage")}, ErrorKind.INVALID),
        ({"ticket": Ticket(signature=b"forged")}, ErrorKind.FORBIDDEN),
        ({"attempt": Attempt(number=2)}, ErrorKind.CONFLICT),
    ],
    ids=lambda value: str(value).replace("\n", " "),
)
def test_an_invalid_prefill_is_refused_and_the_engine_continues(
    stepped: SteppedEngine, fields: dict[str, Any], kind: ErrorKind
) -> None:
    ticket = stepped.ask(reserve=reserve()).reserved.ticket
    number = stepped.send(prefill=prefill(ticket, **fields))
    stepped.run_out()
    assert stepped.failure(number)[0] is kind
    stepped.ask(cancel=CancelCommand(attempt=Attempt(request_id=b"a" * 16, number=1)))
    stepped.assert_free()
    good = stepped.ask(reserve=reserve(name=b"z")).reserved.ticket
    stepped.send(prefill=prefill(good, name=b"z"))
    stepped.run_out()
    assert len(stepped.records) == 4


def test_a_ticket_whose_blocks_do_not_fit_the_prompt_is_refused(stepped: SteppedEngine) -> None:
    ticket = stepped.ask(reserve=reserve()).reserved.ticket
    body = TicketBody.FromString(ticket.body)
    body.block_counts[0] -= 1
    number = stepped.send(prefill=prefill(Ticket(body=body.SerializeToString(), signature=ticket.signature)))
    stepped.turn()
    assert stepped.failure(number)[0] in (ErrorKind.CONFLICT, ErrorKind.FORBIDDEN)


def test_an_unknown_slot_that_ended_is_counted(stepped: SteppedEngine) -> None:
    stepped.send(slot_ended=SlotEndedCommand(slot=1, generation=77))
    stepped.turn()
    assert stepped.ask(report=GetAuditRequest()).report.dropped_unknown == 1
    stepped.assert_free()


def test_a_reservation_does_not_wait_for_the_end_of_a_step(
    stepped: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reservation between two layers is answered there, unless another command precedes it."""
    ticket = stepped.ask(reserve=reserve()).reserved.ticket
    stepped.send(prefill=prefill(ticket))
    loop = stepped.engine.decode.loop
    while not loop.has_work:
        stepped.engine.turn()
    step_decode = stepped.engine.steps.step_decode
    commands: list[int] = []

    def step(between_layers: Callable[[], None]) -> Any:
        def send_once() -> None:
            if not commands:
                commands.append(stepped.send(reserve=reserve(name=b"b")))
                commands.append(stepped.send(report=GetAuditRequest()))
                commands.append(stepped.send(reserve=reserve(name=b"c")))
                steps = stepped.ring.steps
                between_layers()
                stepped.read()
                assert stepped.ring.steps == steps
                assert [stepped.of(number) for number in commands] == [["reserved"], [], []]

        return step_decode(send_once)

    monkeypatch.setattr(stepped.engine.steps, "step_decode", step)
    stepped.run_out()
    assert [stepped.of(number) for number in commands] == [["reserved"], ["report"], ["failed"]]
    assert stepped.failure(commands[2])[0] is ErrorKind.OVERLOADED
    stepped.ask(cancel=CancelCommand(attempt=Attempt(request_id=b"b" * 16, number=1)))
    stepped.assert_free()


def test_the_front_is_woken_by_steps_that_have_ended_and_by_nothing_else(stepped: SteppedEngine) -> None:
    def woken() -> bool:
        ready, _, _ = select.select([stepped.stepped], [], [], 0)
        stepped.stepped.clear()
        return bool(ready)

    ticket = stepped.ask(reserve=reserve()).reserved.ticket
    stepped.send(prefill=prefill(ticket))
    ended = stepped.engine.decode.loop.ring.steps
    assert not woken()
    seen = []
    for _ in range(30):
        stepped.turn()
        before, ended = ended, stepped.engine.decode.loop.ring.steps
        seen.append((ended > before, woken()))
    assert (True, True) in seen
    assert (False, False) in seen
    assert {(True, True), (False, False)} == set(seen)


def test_the_curve_of_steps_is_reported_where_it_was_measured(
    stepped: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = stepped.engine.commands.reports.load
    assert not load().step_costs.decode_curve_sequences
    measured = StepCosts(decode_step_s=0.004, decode_curve=Curve((1.0, 8.0, 9.0), (0.0, 0.0, 0.001)))
    monkeypatch.setattr(stepped.engine.decode, "fit", DecodeFit(measured))
    assert load().step_costs.decode_step_s == 0.004, "without any step that ran"
    monkeypatch.setattr(
        stepped.engine.decode.loop.times, "recent", lambda: RecentSteps(steps=50, tokens=400, mean_ms=4.4)
    )
    costs = load().step_costs
    assert costs.decode_step_s == pytest.approx(0.0044, rel=0.01)
    assert list(costs.decode_curve_sequences) == [1, 8, 9]
    assert list(costs.decode_curve_s) == pytest.approx([0.0, 0.0, 0.0011], rel=0.01)


def test_decode_costs_leave_out_the_wait_for_prefill_steps(
    stepped: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = stepped.engine.decode
    monkeypatch.setattr(decode.loop.times, "recent", lambda: RecentSteps(steps=50, tokens=50, mean_ms=20.0))
    assert decode.costs(0.25).decode_step_s == pytest.approx(0.015, rel=0.01)


def test_costs_count_the_rows_and_tokens_of_steps_with_drafts(
    stepped: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sequences of four rows each, of which most have had two tokens a step."""
    decode = stepped.engine.decode
    measured = StepCosts(decode_step_s=0.004, decode_curve=Curve((1.0, 8.0, 32.0), (0.0, 0.0, 0.001)))
    monkeypatch.setattr(decode, "fit", DecodeFit(measured))
    rates = SimpleNamespace(tokens_a_step=2.0, rows_a_sequence=4.0)
    monkeypatch.setattr(decode.loop, "draft_rates", rates)
    monkeypatch.setattr(decode.loop.progress, "mean_tokens_a_step", lambda: 2.5)
    recent = RecentSteps(steps=50, tokens=1000, mean_ms=5.0)
    monkeypatch.setattr(decode.loop.times, "recent", lambda: recent)
    costs = from_message(stepped.engine.commands.reports.load().step_costs)
    assert costs.decode_s(8, 0) == pytest.approx(0.005, rel=0.01)
    assert costs.token_s(8, 0) == pytest.approx(0.0025, rel=0.01)


def test_contexts_count_for_as_many_sequences_as_the_measured_steps_had(
    stepped: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst of 40 sequences begins, of whose first second steps had 20 on average; then two of them are
    left, and none."""
    decode = stepped.engine.decode
    measured = StepCosts(decode_step_s=0.004, decode_context_token_s=3e-8)
    monkeypatch.setattr(decode, "fit", DecodeFit(measured))
    for running, sequences in ((40, 20), (2, 20), (0, 2)):
        allocation = SimpleNamespace(running=running, context_tokens=1100 * running)
        monkeypatch.setattr(decode, "allocation", allocation)
        recent = RecentSteps(steps=100, tokens=100 * sequences, mean_ms=4.0 + sequences * 1100 * 3e-5)
        monkeypatch.setattr(decode.loop.times, "recent", lambda: recent)  # noqa: B023
        costs = decode.costs(0.0)
        assert costs.decode_s(40, 44_000) == pytest.approx(0.004 + 44_000 * 3e-8, rel=1e-3)
