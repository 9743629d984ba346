"""Canary generations in an engine: they run on the engine's own path and leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from baton.base.errors import ErrorKind
from baton.engine.shared_memory.output_ring import Finish
from baton.v1.engine_pb2 import CanaryCommand
from baton.v1.types_pb2 import WorkerRole
from baton.v1.worker_pb2 import GetAuditRequest
from tests.worker.engine.stepped_engine import SLOTS, SteppedEngine, prefill, reserve

Make = Callable[..., SteppedEngine]
PREFILL = CanaryCommand(side=WorkerRole.WORKER_ROLE_PREFILL)
DECODE = CanaryCommand(side=WorkerRole.WORKER_ROLE_DECODE)
ADMIT = CanaryCommand(side=WorkerRole.WORKER_ROLE_DECODE, admit=True)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., SteppedEngine]]:
    """Makes engines that are closed at the end."""
    with ExitStack() as stack:

        def make(role: str, **settings: Any) -> SteppedEngine:
            engine = SteppedEngine(tmp_path, role, **settings)  # type: ignore[arg-type]
            stack.callback(engine.close)
            return engine

        yield make


def cancelled(command: CanaryCommand) -> CanaryCommand:
    return CanaryCommand(side=command.side, cancel=True)


def assert_uncounted(engine: SteppedEngine) -> None:
    report = engine.ask(report=GetAuditRequest()).report
    assert (report.prompts_run, report.prompt_tokens_run) == (0, 0)
    assert (report.tokens_decoded, report.sequence_steps) == (0, 0)
    assert [(sum(drafts.rows), sum(drafts.accepted)) for drafts in report.drafts] == [(0, 0)] * len(
        report.drafts
    )
    assert (report.prefixes.missed_tokens, report.prefixes.device_blocks, report.handoffs_committed) == (
        0,
        0,
        0,
    )
    assert report.tombstones == 0
    engine.assert_free()


def test_a_prompt_is_computed(make: Make) -> None:
    engine = make("prefill", prefix_secret="theirs")
    for _ in range(2):
        number = engine.send(canary=PREFILL)
        engine.run_out()
        assert engine.of(number) == ["prefill_ended"]
    assert engine.engine.prefill.steps.steps_ended >= 2
    assert_uncounted(engine)


@pytest.mark.parametrize("speculation", ["off", "lookup", "auto", "table"])
def test_an_output_is_decoded(make: Make, speculation: str) -> None:
    engine = make("decode", prefix_secret="theirs", speculation=speculation)
    for _ in range(SLOTS + 1):
        engine.records.clear()
        canary = engine.ask(canary=DECODE).canary
        engine.run_out()
        assert not engine.records, "its front does not know the slot yet"
        assert engine.ask(canary=ADMIT).WhichOneof("event") == "done"
        engine.run_out()
        own = {(record.slot, record.generation) for record in engine.records}
        assert own == {(canary.slot, canary.generation)}
        assert sum(record.has_token for record in engine.records) == canary.tokens == 5
        assert engine.records[-1].finish is Finish.LENGTH
    assert_uncounted(engine)


@pytest.mark.parametrize("speculation", ["off", "lookup"])
def test_counts_are_of_requests_alone(make: Make, speculation: str) -> None:
    """Canaries before, beside and behind requests; one is cancelled."""
    engine = make("both", speculation=speculation)

    def counts() -> tuple[int, int]:
        """Tokens, and those of them that were accepted drafts."""
        report = engine.ask(report=GetAuditRequest()).report
        accepted = sum(sum(drafts.accepted) for drafts in report.drafts)
        assert report.sequence_steps == report.tokens_decoded - accepted
        return report.tokens_decoded, accepted

    def canary() -> None:
        engine.ask(canary=DECODE)
        engine.ask(canary=ADMIT)

    canary()
    engine.run_out()
    assert counts() == (0, 0)
    output: list[int] = []
    for number in range(2):
        engine.records.clear()
        command = reserve(name=bytes([number]), most=20)
        command.prediction_token_ids[:] = output
        reserved = engine.ask(reserve=command).reserved
        engine.send(prefill=prefill(reserved.ticket, name=bytes([number]), most=20))
        canary()
        engine.play()
        engine.ask(canary=cancelled(DECODE))
        engine.run_out()
        assert counts()[0] == 19 * (number + 1)
        output = [record.token for record in engine.records if record.slot == reserved.slot]
    canary()
    engine.run_out()
    assert counts()[0] == 38
    assert bool(counts()[1]) is (speculation != "off")


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_both_run_on_a_gpu(numerics: str, make: Make) -> None:
    engine = make("both", device="cuda", dtype="bfloat16", numerics=numerics, block_tokens=16)
    for command, answer in ((PREFILL, "prefill_ended"), (DECODE, "canary")):
        engine.records.clear()
        number, deadline = engine.send(canary=command), time.monotonic() + 30
        if command is DECODE:
            engine.send(canary=ADMIT)
        while engine.of(number) != [answer] or (
            command is DECODE and not any(record.finish for record in engine.records)
        ):
            engine.play()
            assert time.monotonic() < deadline, engine.events[-3:]
    assert [record.finish for record in engine.records][-1] is Finish.LENGTH
    engine.run_out()
    assert_uncounted(engine)


def test_its_blocks_are_accounted_for_while_it_runs(make: Make) -> None:
    engine = make("decode")
    for command in (DECODE, ADMIT):
        engine.ask(canary=command)
        report = engine.ask(report=GetAuditRequest()).report
        assert report.integrity_error == ""
        assert report.load.free_slots == SLOTS - 1
    engine.run_out()
    engine.assert_free()


def test_one_at_a_time(make: Make) -> None:
    engine = make("both")
    for command in (PREFILL, DECODE):
        first, second = engine.send(canary=command), engine.send(canary=command)
        engine.run_out()
        assert engine.of(first) != ["failed"]
        assert engine.failure(second) == (ErrorKind.CONFLICT, "a canary generation is running already")
    assert engine.ask(canary=ADMIT).WhichOneof("event") == "done"
    again = engine.send(canary=ADMIT)
    engine.run_out()
    assert engine.failure(again)[0] is ErrorKind.CONFLICT
    engine.assert_free()


def test_cancelled_ones_leave_nothing(make: Make) -> None:
    engine = make("both", chunk_tokens=2)
    began, ended = engine.send(canary=PREFILL), engine.send(canary=cancelled(PREFILL))
    engine.run_out()
    assert engine.failure(began)[0] is ErrorKind.CONFLICT
    assert engine.of(ended) == ["done"]
    for admitted in (False, True):
        began = engine.send(canary=DECODE)
        if admitted:
            engine.send(canary=ADMIT)
        engine.send(canary=cancelled(DECODE))
        engine.run_out()
        assert engine.of(began) == ["canary"]
        assert bool(engine.records) is admitted
    assert engine.records[-1].finish is Finish.CANCELLED
    late = engine.send(canary=ADMIT)
    engine.run_out()
    assert engine.failure(late)[0] is ErrorKind.CONFLICT
    assert engine.ask(canary=cancelled(DECODE)).WhichOneof("event") == "done", "none runs"
    engine.assert_free()


def test_a_full_engine_refuses_and_requests_keep_their_slots(make: Make) -> None:
    engine = make("decode")
    for number in range(SLOTS):
        engine.ask(reserve=reserve(name=bytes([number])))
    number = engine.send(canary=DECODE)
    engine.turn()
    assert engine.failure(number)[0] is ErrorKind.OVERLOADED


@pytest.mark.parametrize(("role", "command"), [("prefill", DECODE), ("decode", PREFILL)])
def test_a_role_runs_only_its_own(role: str, command: CanaryCommand, make: Make) -> None:
    engine = make(role)
    number = engine.send(canary=command)
    engine.turn()
    assert engine.failure(number)[0] is ErrorKind.CONFLICT
