"""The TPOT limits by which an engine paces its prefill steps."""

from __future__ import annotations

from pathlib import Path

from baton.v1.decode_pb2 import TicketBody
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve


def test_an_engine_keeps_the_tightest_limit_of_its_requests(tmp_path: Path) -> None:
    engine = SteppedEngine(tmp_path, "both", tpot_slo_ms=50.0)
    limit_s, reserved = engine.engine.steps.planner.pacing.limit_s, engine.engine.decode.reserved
    assert limit_s() == 0.05
    tickets = []
    for name, tpot_s in ((b"a", 0.01), (b"b", 0.0)):
        command = reserve(name=name)
        command.tpot_slo_s = tpot_s
        event = engine.ask(reserve=command)
        tickets.append(TicketBody.FromString(event.reserved.ticket.body).transfer_id)
    assert limit_s() == 0.01
    assert not reserved.all_limited
    for ticket, left in zip(reversed(tickets), (0.01, 0.05), strict=True):
        reserved.end_unused(ticket)
        assert limit_s() == left
        assert reserved.all_limited
    engine.assert_free()
    engine.close()


def test_an_engine_whose_limit_cannot_be_met_computes_every_prompt(tmp_path: Path) -> None:
    engine = SteppedEngine(tmp_path, "both", tpot_slo_ms=0.001)
    numbers = []
    for name in (b"a", b"b"):
        event = engine.ask(reserve=reserve(name=name, tokens=30, most=20)).reserved
        numbers.append(engine.send(prefill=prefill(event.ticket, name=name, tokens=30, most=20)))
    engine.run_out()
    assert all(engine.of(number)[-1] == "prefill_ended" for number in numbers)
    engine.assert_free()
    engine.close()
