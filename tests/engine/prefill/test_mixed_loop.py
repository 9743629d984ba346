"""Prefill steps of which decode steps are part: what they take, when they join, what follows what."""

from __future__ import annotations

import math

import pytest

from baton.engine.prefill.loop import PrefillLoop
from baton.perf_model.row_times import RowTimes
from bench.engine_driver import take
from tests.engine.prefill.slow_device import Ahead, NumberedPass


class DecodeRows:
    """Of a step that takes 20 ms by itself; the device does not take them into account."""

    rows = 4
    step_s = 0.02

    def __init__(self) -> None:
        self.idle = False
        self.joined_last = True

    @property
    def rows_to_join(self) -> int:
        return 0 if self.idle else self.rows

    def join(self) -> DecodeRows | None:
        return None if self.idle else self

    def begin(self, workspace: object) -> None: ...

    def attend(self, attention: object, workspace: object) -> None: ...

    def end(self, workspace: object) -> None: ...


def test_what_a_decode_step_takes_that_is_part_of_a_step_is_not_the_prompts() -> None:
    ahead = Ahead(tokens=100)
    ahead.stream.in_turn = True
    ahead.loop.decode = decode = DecodeRows()
    ahead.add(300)
    assert ahead.loop.begin()
    assert ahead.passes.joined == [decode]
    assert ahead.loop.ends_in_s == pytest.approx(0.12), "what is predicted of both"
    ahead.stream.now = 0.1
    take(ahead.loop)
    assert ahead.loop.device_s == pytest.approx(0.08)
    decode.idle = True
    assert ahead.loop.begin()
    ahead.stream.now = 0.2
    take(ahead.loop)
    assert ahead.loop.device_s == pytest.approx(0.18)
    decode.idle, decode.step_s = False, 1.0
    assert ahead.loop.begin()
    ahead.stream.now = 0.31
    take(ahead.loop)
    assert ahead.loop.device_s == pytest.approx(0.19), "a tenth at least"


def test_a_mixed_step_follows_another_where_streams_have_time() -> None:
    ahead = Ahead(tokens=100)
    ahead.stream.in_turn = ahead.scheduler.beside_decode = True
    ahead.loop.decode = decode = DecodeRows()
    ahead.add(300)
    assert ahead.loop.begin()
    assert take(ahead.loop) == []  # it is seen to run, and should end at 0.12
    assert not ahead.loop.follows
    ahead.stream.now = 0.11
    assert not ahead.loop.begin(), "a decode step runs between"
    ahead.loop.may_follow = True
    assert ahead.loop.follows
    decode.joined_last = False
    assert not ahead.loop.follows, "one is enqueued already"
    decode.joined_last = True
    assert ahead.loop.begin()
    assert ahead.loop.ends_in_s == pytest.approx(0.13)
    assert (ahead.stream.rows, ahead.passes.joined) == ([100] * 2, [decode] * 2)
    assert not ahead.loop.begin(), "two are under way"
    assert ahead.loop.follows, "a third will be"
    ahead.stream.now = 0.23
    assert [result.chunk.start for result in take(ahead.loop)] == [0, 100]
    assert not ahead.loop.follows, "nothing is under way"
    decode.idle = True
    assert ahead.loop.begin()
    assert not ahead.loop.follows, "no decode step is part of it"


@pytest.mark.parametrize(("blocks", "follows"), [(200, True), (30, False)])
def test_a_mixed_step_follows_where_prompts_wait_that_have_blocks(blocks: int, *, follows: bool) -> None:
    ahead = Ahead(tokens=100, blocks=blocks)
    ahead.stream.in_turn = ahead.scheduler.beside_decode = ahead.loop.may_follow = True
    ahead.loop.decode = DecodeRows()
    ahead.add(100)
    ahead.add(100)
    assert ahead.loop.begin()
    take(ahead.loop)
    ahead.stream.now = 0.119
    assert ahead.loop.follows is follows
    assert ahead.loop.begin() is follows
    assert not ahead.loop.follows, "nothing more waits"


def test_the_end_of_a_step_behind_decode_steps_is_known_though_the_host_sees_it_late() -> None:
    ahead = Ahead(tokens=100)
    ahead.stream.in_turn = ahead.scheduler.beside_decode = ahead.loop.may_follow = True
    ahead.loop.decode = DecodeRows()
    ahead.stream.free_at = 0.05
    ahead.add(300)
    assert ahead.loop.begin()
    assert math.isinf(ahead.loop.ends_in_s)
    ahead.stream.now = 0.05
    take(ahead.loop)
    assert ahead.loop.ends_in_s == pytest.approx(0.12)
    ahead.stream.now = 0.16
    assert ahead.loop.begin()
    ahead.stream.now = 0.19  # it ended at 0.15; the host had thought of 0.17
    take(ahead.loop)
    assert ahead.loop.ends_in_s == pytest.approx(0.17 + 0.11 - 0.19), "one takes 0.11 by now"


def test_a_decode_step_joins_where_products_of_both_take_no_longer() -> None:
    ahead = Ahead(tokens=100)
    ahead.loop.decode = decode = DecodeRows()
    for both_s, joins in ((0.03, True), (0.0301, False)):
        ahead.scheduler.row_times = RowTimes((4, 100, 104), (0.01, 0.02, both_s))
        ahead.add(100)
        assert ahead.loop.begin()
        assert ahead.passes.joined[-1] == (decode if joins else None)
        ahead.stream.now += 0.2
        take(ahead.loop)


@pytest.mark.parametrize(
    ("rows", "graph_rows", "uncaptured", "joins"),
    [
        (100, 104, "", True),
        (100, 103, "", False),
        (104, 103, "", True),
        (100, 0, "no memory", True),
        (100, 104, "no memory for both", False),
    ],
)
def test_a_decode_step_joins_where_that_takes_no_graph_from_a_step(
    rows: int, graph_rows: int, uncaptured: str, *, joins: bool
) -> None:
    ahead = Ahead(tokens=rows)
    ahead.scheduler.graph_rows, ahead.passes.uncaptured = graph_rows, uncaptured
    ahead.loop.decode = decode = DecodeRows()
    ahead.add(rows)
    assert ahead.loop.begin()
    assert ahead.passes.joined == [decode if joins else None]


def test_the_scheduler_knows_what_the_loops_pass_is_fast_with() -> None:
    ahead = Ahead(tokens=100)
    times = RowTimes((64,), (0.1,))
    passes = NumberedPass(ahead.stream, graph_rows=7, row_times=times)
    PrefillLoop(passes, ahead.scheduler, ahead.stream)
    assert (ahead.scheduler.graph_rows, ahead.scheduler.row_times) == (7, times)
