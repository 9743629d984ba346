"""A reservation keeps its request's prediction and the most drafts of a step, and its ticket has neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.v1.decode_pb2 import TicketBody
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve


def test_a_reservation_keeps_them_and_its_ticket_does_not(tmp_path: Path) -> None:
    engine = SteppedEngine(tmp_path, "both")
    reserved = engine.engine.decode.reserved
    bodies = []
    for name, prediction, most in ((b"a", (5, 6, 7), 3), (b"b", (), None)):
        command = reserve(name=name)
        command.prediction_token_ids.extend(prediction)
        if most is not None:
            command.max_draft_tokens = most
        event = engine.ask(reserve=command)
        body = TicketBody.FromString(event.reserved.ticket.body)
        entry = engine.engine.decode.tickets.find_transfer(body.transfer_id)
        assert entry is not None
        assert tuple(entry.reservation.prediction) == prediction
        assert entry.reservation.max_draft_tokens == most
        bodies.append(body)
    assert len({len(body.SerializeToString()) for body in bodies}) == 1
    assert bodies[0].fingerprint == bodies[1].fingerprint
    for body in bodies:
        reserved.end_unused(body.transfer_id)
    engine.assert_free()
    engine.close()


def test_a_prediction_out_of_range_takes_nothing(tmp_path: Path) -> None:
    engine = SteppedEngine(tmp_path, "both")
    command = reserve()
    command.prediction_token_ids.append(2**31)
    assert engine.ask(reserve=command).failed.message.startswith("a token id is outside")
    engine.assert_free()
    engine.close()


def test_both_are_given_to_the_slot_when_its_sequence_is_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SteppedEngine(tmp_path, "both")
    loop, given = engine.engine.decode.loop, list[tuple[tuple[int, ...], int | None]]()
    begin = loop.begin_admission

    def noted(*args: Any, **fields: Any) -> Any:
        given.append((tuple(fields["prediction"]), fields["most_drafts"]))
        return begin(*args, **fields)

    monkeypatch.setattr(loop, "begin_admission", noted)
    command = reserve()
    command.prediction_token_ids.extend((5, 6, 7))
    command.max_draft_tokens = 2
    ticket = engine.ask(reserve=command).reserved.ticket
    transfer = TicketBody.FromString(ticket.body).transfer_id
    entry = engine.engine.decode.tickets.find_transfer(transfer)
    engine.send(prefill=prefill(ticket))
    engine.run_out()
    assert given == [((5, 6, 7), 2)]
    assert entry is not None
    assert entry.reservation.prediction == ()
    engine.assert_free()
    engine.close()
