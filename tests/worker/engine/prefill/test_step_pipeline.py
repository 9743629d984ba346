"""Prefill on a device that ends its steps some turns after they were begun, as a GPU does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.device.streams.stream import HostStream, TimedEvent
from baton.engine.executor.decode_factory import decode_loop
from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.memory.kv_cache import BlockMemory
from baton.engine.model.modules import Model
from baton.engine.plan.decode_rows import next_rows
from baton.engine.plan.decode_state import DecodeState
from baton.engine.plan.prefill_step import PrefillStep
from baton.engine.plan.step_plan import DecodeRows
from baton.engine.prefill.gpu_pass import PrefillPass
from baton.v1.engine_pb2 import CancelCommand
from baton.v1.types_pb2 import Attempt
from tests.engine.prompt_passes import SMALL_RULE, SMALL_TUNING
from tests.support.events import FakeEvent
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve

TURNS = 3
# The engine of these tests is a CPU's.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton does not interpret beside a GPU")


class LateEvent(FakeEvent):
    """Ends after a few polls."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = 0

    def query(self) -> bool:
        self._looks += 1
        return self._looks > TURNS

    def seconds_since(self, earlier: TimedEvent) -> float:
        return 1e-6


class LateStream(HostStream):
    asynchronous = True

    def record_event(self) -> LateEvent:
        return LateEvent()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "services.worker.engine.startup.prefill_setup.compute_stream", lambda device: LateStream()
    )


def rest(stepped: SteppedEngine) -> None:
    """Turns until there is nothing to do and no step runs."""
    loop = stepped.engine.prefill.steps
    for _ in range(2000):
        if not stepped.play() and not loop.under_way:
            return
    raise AssertionError("the engine does not come to rest")


def start(stepped: SteppedEngine, name: bytes, tokens: int) -> int:
    reserved = stepped.ask(reserve=reserve(name=name, tokens=tokens)).reserved
    return stepped.send(prefill=prefill(reserved.ticket, name=name, tokens=tokens))


def outputs(stepped: SteppedEngine) -> tuple[list[int], list[int]]:
    """First tokens, and those of decode."""
    firsts = [e.prefill.first_token.token_id for e in stepped.events if e.prefill.HasField("first_token")]
    return sorted(firsts), sorted(record.token for record in stepped.records if record.has_token)


def run(folder: Path, **engine: Any) -> tuple[list[int], list[int]]:
    folder.mkdir()
    stepped = SteppedEngine(folder, **engine)
    for name, tokens in ((b"a", 9), (b"b", 30)):
        start(stepped, name, tokens)
    rest(stepped)
    for name, tokens in ((b"c", 21), (b"d", 16)):
        start(stepped, name, tokens)
    rest(stepped)
    found = outputs(stepped)
    stepped.assert_free()
    stepped.close()
    return found


@pytest.mark.slow
@interpreted
def test_tokens_are_the_same_with_the_gpu_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    expected = run(tmp_path / "plain")
    assert len(expected[0]) == 4
    request.getfixturevalue("late")
    assert run(tmp_path / "late") == expected

    def by_kernels(ranks: Sequence[Model], cache: BlockMemory, most_rows: int, **_: object) -> PrefillPass:
        (model,), (own,) = ranks, cache.ranks
        return PrefillPass(model, own, most_rows, SMALL_RULE, SMALL_TUNING)

    monkeypatch.setattr("services.worker.engine.startup.prefill_setup.prompt_pass", by_kernels)
    assert run(tmp_path / "kernels") == expected


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("how", ["at once", "late"])
def test_tokens_are_the_same_where_decode_steps_are_part_of_prefill_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, how: str
) -> None:
    expected = run(tmp_path / "plain")
    joined_steps: list[bool] = []

    class WatchedPass(PrefillPass):
        def forward(self, step: PrefillStep, joined: JoinedRows | None = None) -> Tensor:
            joined_steps.append(joined is not None)
            return super().forward(step, joined)

    def by_kernels(
        ranks: Sequence[Model], cache: BlockMemory, most_rows: int, joined: Sequence[JoinedRows], **_: object
    ) -> PrefillPass:
        (model,), (own,) = ranks, cache.ranks
        return WatchedPass(model, own, most_rows, SMALL_RULE, SMALL_TUNING, joined=joined)

    monkeypatch.setattr("services.worker.engine.startup.prefill_setup.prompt_pass", by_kernels)
    monkeypatch.setattr("services.worker.engine.assembly.decode_loop", partial(decode_loop, interpreted=True))
    if how == "late":
        request.getfixturevalue("late")
    assert run(tmp_path / "mixed", numerics="fast", mixed_steps=True) == expected
    assert any(joined_steps)
    assert not all(joined_steps)


@pytest.mark.usefixtures("late")
def test_nothing_is_sent_or_pushed_before_its_step_has_ended(tmp_path: Path) -> None:
    stepped = SteppedEngine(tmp_path)
    start(stepped, b"a", 30)
    stepped.turn()
    side = stepped.engine.prefill
    (sequence,) = side.jobs.scheduler.sequences
    job = side.jobs.find(sequence)
    assert job is not None
    assert side.steps.under_way
    assert (job.pushed, job.sequence.computed, job.sequence.begun) == ([0], 0, 8)
    while not job.sequence.computed:
        assert job.pushed == [0]
        stepped.turn()
    assert job.pushed == [job.sequence.computed // 4]
    rest(stepped)
    stepped.assert_free()
    stepped.close()


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("turns", [1, 3, 8])
def test_a_cancel_at_any_turn_frees_everything(tmp_path: Path, turns: int) -> None:
    stepped = SteppedEngine(tmp_path)
    number = start(stepped, b"a", 40)
    other = start(stepped, b"b", 20)
    stepped.turn(turns)
    assert stepped.engine.prefill.steps.under_way
    stepped.send(cancel=CancelCommand(attempt=Attempt(request_id=b"a" * 16, number=1)))
    rest(stepped)
    assert "failed" in stepped.of(number)
    assert "failed" not in stepped.of(other)
    assert len(outputs(stepped)[0]) == 1
    stepped.assert_free()
    stepped.close()


def test_decode_steps_are_planned_beside_prefill_steps_that_alternate_with_them(
    late: None, stepped: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[bool] = []

    def watched(state: DecodeState, *, behind_prefill: bool) -> DecodeRows | None:
        reported.append(behind_prefill)
        return next_rows(state, behind_prefill=behind_prefill)

    monkeypatch.setattr("baton.engine.plan.step_planner.next_rows", watched)
    start(stepped, b"a" * 16, 9)
    rest(stepped)
    assert not any(reported), "an independent stream runs concurrently with decode"
    stepped.engine.prefill.steps.state.in_turn = True
    start(stepped, b"b" * 16, 9)
    rest(stepped)
    assert any(reported)
    assert not reported[-1]
