"""A worker whose device ends its prefill steps some turns after they were begun, as a GPU does."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.device.lane import HostLane, Moment
from baton.engine.cache import KVCache
from baton.engine.decoder import Decoder
from baton.engine.prefill_pass import PrefillPass
from baton.v1.engine_pb2 import CancelCommand
from baton.v1.types_pb2 import Attempt
from tests.engine.prompt_passes import SMALL_RULE, SMALL_TUNING
from tests.worker.turned import Turned, prefill, reserve

TURNS = 3


class LateMoment:
    """Ended at the third look."""

    def __init__(self) -> None:
        self._looks = 0

    def ended(self) -> bool:
        self._looks += 1
        return self._looks > TURNS

    def seconds_since(self, earlier: Moment) -> float:
        return 1e-6


class LateLane(HostLane):
    runs_ahead = True

    def moment(self) -> LateMoment:
        return LateMoment()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.prefill_loop.lane_of", lambda device: LateLane())


def rest(turned: Turned) -> None:
    """Turns until nothing happens and no step is under way."""
    loop = turned.engine._parts.prefill.loop
    for _ in range(2000):
        if not turned.play() and not loop.under_way:
            return
    raise AssertionError("the engine does not come to rest")


def start(turned: Turned, name: bytes, tokens: int) -> int:
    reserved = turned.ask(reserve=reserve(name=name, tokens=tokens)).reserved
    return turned.send(prefill=prefill(reserved.ticket, name=name, tokens=tokens))


def outputs(turned: Turned) -> tuple[list[int], list[int]]:
    """First tokens, and those of decode."""
    firsts = [e.prefill.first_token.token_id for e in turned.events if e.prefill.HasField("first_token")]
    return sorted(firsts), sorted(record.token for record in turned.records if record.has_token)


def run(folder: Path) -> tuple[list[int], list[int]]:
    folder.mkdir()
    turned = Turned(folder)
    for name, tokens in ((b"a", 9), (b"b", 30)):
        start(turned, name, tokens)
    rest(turned)
    for name, tokens in ((b"c", 21), (b"d", 16)):
        start(turned, name, tokens)
    rest(turned)
    found = outputs(turned)
    turned.assert_free()
    turned.close()
    return found


@pytest.mark.slow
def test_the_tokens_are_the_same_by_the_kernels_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    expected = run(tmp_path / "plain")
    assert len(expected[0]) == 4
    request.getfixturevalue("late")
    assert run(tmp_path / "late") == expected

    def by_kernels(decoder: Decoder, cache: KVCache, most_rows: int, **_: bool) -> PrefillPass:
        return PrefillPass(decoder, cache, most_rows, SMALL_RULE, SMALL_TUNING)

    monkeypatch.setattr("services.worker.prefill_loop.prompt_pass", by_kernels)
    assert run(tmp_path / "kernels") == expected


@pytest.mark.usefixtures("late")
def test_nothing_is_told_or_pushed_before_its_step_has_ended(tmp_path: Path) -> None:
    turned = Turned(tmp_path)
    start(turned, b"a", 30)
    turned.turn()
    side = turned.engine._parts.prefill
    (job,) = side._jobs.values()
    assert side.loop.under_way
    assert (job.pushed, job.sequence.computed, job.sequence.begun) == ([0], 0, 8)
    while not job.sequence.computed:
        assert job.pushed == [0]
        turned.turn()
    assert job.pushed == [job.sequence.computed // 4]
    rest(turned)
    turned.assert_free()
    turned.close()


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("turns", [1, 3, 8])
def test_cancelled_at_any_turn_it_leaves_nothing(tmp_path: Path, turns: int) -> None:
    turned = Turned(tmp_path)
    number = start(turned, b"a", 40)
    other = start(turned, b"b", 20)
    turned.turn(turns)
    assert turned.engine._parts.prefill.loop.under_way
    turned.send(cancel=CancelCommand(attempt=Attempt(request_id=b"a" * 16, number=1)))
    rest(turned)
    assert "failed" in turned.of(number)
    assert "failed" not in turned.of(other)
    assert len(outputs(turned)[0]) == 1
    turned.assert_free()
    turned.close()
