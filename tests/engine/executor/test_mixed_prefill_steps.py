"""Prefill steps of which decode steps are part: what they take, when they join, what follows what."""

from __future__ import annotations

import math

import pytest

from baton.engine.executor.prefill_steps import PrefillSteps
from baton.perf_model.row_times import RowTimes
from bench.engine_driver import take
from tests.engine.executor.slow_device import Ahead, NumberedPass, SlowDecode


def beside(tokens: int, blocks: int = 200) -> tuple[Ahead, SlowDecode]:
    """Prefill steps in turn with decode steps that may join them."""
    decode = SlowDecode()
    ahead = Ahead(tokens, blocks, decode=decode)
    ahead.loop.state.in_turn = ahead.scheduler.beside_decode = True
    return ahead, decode


def test_what_a_decode_step_takes_that_is_part_of_a_step_is_not_the_prompts() -> None:
    ahead, decode = beside(tokens=100)
    ahead.scheduler.beside_decode = False
    ahead.add(300)
    assert ahead.begin()
    assert ahead.passes.joined == [decode]
    assert ahead.loop.ends_in_s == pytest.approx(0.12), "what is predicted of both"
    ahead.stream.now = 0.1
    take(ahead.executor)
    assert ahead.loop.times.busy_s == pytest.approx(0.08)
    decode.steps.moves = False
    assert ahead.begin()
    ahead.stream.now = 0.2
    take(ahead.executor)
    assert ahead.loop.times.busy_s == pytest.approx(0.18)
    decode.steps.moves, decode.step_s = True, 1.0
    assert ahead.begin()
    ahead.stream.now = 0.31
    take(ahead.executor)
    assert ahead.loop.times.busy_s == pytest.approx(0.19), "a tenth at least"


def test_a_decode_step_runs_between_mixed_steps_where_streams_have_no_time() -> None:
    ahead, _ = beside(tokens=100)
    ahead.add(300)
    assert ahead.begin()
    assert take(ahead.executor) == []  # it is seen to run, and should end at 0.12
    assert not ahead.follows
    ahead.stream.now = 0.11
    assert not ahead.begin()


def test_a_mixed_step_follows_another_where_streams_have_time() -> None:
    ahead, decode = beside(tokens=100)
    ahead.pacing.may_follow = True
    ahead.add(300)
    assert ahead.begin()
    assert take(ahead.executor) == []
    ahead.stream.now = 0.11
    assert ahead.follows
    decode.steps.launched += 1
    assert not ahead.follows, "one is enqueued already"
    decode.steps.launched -= 1
    assert ahead.begin()
    assert ahead.loop.ends_in_s == pytest.approx(0.13)
    assert (ahead.stream.rows, ahead.passes.joined) == ([100] * 2, [decode] * 2)
    assert not ahead.begin(), "two are under way"
    assert ahead.follows, "a third will be"
    ahead.stream.now = 0.23
    assert [result.chunk.start for result in take(ahead.executor)] == [0, 100]
    assert not ahead.follows, "nothing is under way"
    decode.steps.moves = False
    assert ahead.begin()
    assert not ahead.follows, "no decode step is part of it"


@pytest.mark.parametrize(("blocks", "follows"), [(200, True), (30, False)])
def test_a_mixed_step_follows_where_prompts_wait_that_have_blocks(blocks: int, *, follows: bool) -> None:
    ahead, _ = beside(tokens=100, blocks=blocks)
    ahead.pacing.may_follow = True
    ahead.add(100)
    ahead.add(100)
    assert ahead.begin()
    take(ahead.executor)
    ahead.stream.now = 0.119
    assert ahead.follows is follows
    assert ahead.begin() is follows
    assert not ahead.follows, "nothing more waits"


def test_the_end_of_a_step_behind_decode_steps_is_known_though_the_host_sees_it_late() -> None:
    ahead, _ = beside(tokens=100)
    ahead.pacing.may_follow = True
    ahead.stream.free_at = 0.05
    ahead.add(300)
    assert ahead.begin()
    assert math.isinf(ahead.loop.ends_in_s)
    ahead.stream.now = 0.05
    take(ahead.executor)
    assert ahead.loop.ends_in_s == pytest.approx(0.12)
    ahead.stream.now = 0.16
    assert ahead.begin()
    ahead.stream.now = 0.19  # it ended at 0.15; the host had thought of 0.17
    take(ahead.executor)
    assert ahead.loop.ends_in_s == pytest.approx(0.17 + 0.11 - 0.19), "one takes 0.11 by now"


def test_a_decode_step_joins_where_products_of_both_take_no_longer() -> None:
    ahead, decode = beside(tokens=100)
    for both_s, joins in ((0.03, True), (0.0301, False)):
        ahead.scheduler.row_times = RowTimes((4, 100, 104), (0.01, 0.02, both_s))
        ahead.add(100)
        assert ahead.begin()
        assert ahead.passes.joined[-1] == (decode if joins else None)
        ahead.stream.now += 0.2
        take(ahead.executor)


@pytest.mark.parametrize(
    ("rows", "graph_rows", "one_graph", "joins"),
    [
        (100, 104, True, True),
        (100, 103, True, False),
        (104, 103, True, True),
        (100, 0, False, True),
        (100, 104, False, False),
    ],
)
def test_a_decode_step_joins_where_that_takes_no_graph_from_a_step(
    rows: int, graph_rows: int, *, one_graph: bool, joins: bool
) -> None:
    ahead, decode = beside(tokens=rows)
    ahead.scheduler.graph_rows, ahead.loop.state.one_graph = graph_rows, one_graph
    ahead.add(rows)
    assert ahead.begin()
    assert ahead.passes.joined == [decode if joins else None]


def test_the_scheduler_knows_what_the_loops_pass_is_fast_with() -> None:
    ahead = Ahead(tokens=100)
    times = RowTimes((64,), (0.1,))
    passes = NumberedPass(ahead.stream, graph_rows=7, row_times=times)
    PrefillSteps(passes, ahead.scheduler, ahead.stream)
    assert (ahead.scheduler.graph_rows, ahead.scheduler.row_times) == (7, times)
