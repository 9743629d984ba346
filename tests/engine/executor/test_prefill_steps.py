"""Steps that are launched ahead: what a step's chunks lead to happens when it has ended, and not before."""

from __future__ import annotations

import math
import random
import threading
import time

import pytest

from baton.engine.sequence import Sequence
from bench.engine_driver import prefill_step, take
from tests.engine.executor.slow_device import BLOCK, PACE, VOCAB, Ahead


def test_the_next_step_is_begun_before_the_last_has_ended_and_no_third() -> None:
    ahead = Ahead(tokens=100, measured=False)
    sequence = ahead.add(400)
    assert ahead.begin()
    assert ahead.begin()
    assert not ahead.begin()
    assert take(ahead.executor) == []
    assert (sequence.computed, sequence.reached) == (0, 200)
    ahead.stream.now = 0.1
    assert [(r.chunk.start, r.chunk.count) for r in take(ahead.executor)] == [(0, 100)]
    assert (sequence.computed, sequence.reached) == (100, 200)
    ahead.stream.now = 0.199
    assert ahead.begin()
    ahead.stream.now = 0.4
    results = take(ahead.executor)
    assert [r.token for r in results] == [None, None]
    assert ahead.begin()
    ahead.stream.now = 0.5
    assert [r.token for r in take(ahead.executor)] == [399 % VOCAB]
    assert not ahead.begin()
    assert ahead.stream.rows == [100] * 4
    assert not ahead.loop.under_way


def test_an_end_that_is_awaited_is_seen_when_it_comes() -> None:
    """The reported time lies after the last look at which the step ran."""
    ahead = Ahead(tokens=100)
    ahead.add(100)
    ahead.begin()
    begun = time.monotonic_ns()
    assert not ahead.loop.await_end(0.002)
    assert time.monotonic_ns() - begun > 2e6
    coming = threading.Timer(0.02, setattr, (ahead.stream, "now", 0.1))
    coming.start()
    assert ahead.loop.await_end(5.0)
    seen = time.monotonic_ns()
    (result,) = take(ahead.executor)
    assert result.token == 99 % VOCAB
    assert begun + 2e6 < ahead.loop.ended_after_ns <= seen
    assert ahead.loop.await_end(0.0), "nothing is under way"
    coming.join()


def test_who_comes_late_need_not_wait_for_two_steps() -> None:
    """The next step is begun just before the last one ends, once it is known how long steps take."""
    ahead = Ahead(tokens=100)
    ahead.add(400)
    assert ahead.begin()
    for ahead.stream.now in (0.078, 0.082, 0.0855):
        assert not ahead.begin()
    short = ahead.add(5)
    ahead.stream.now = 0.089
    assert ahead.begin()
    ahead.stream.now = 0.2
    assert short in [result.chunk.sequence for result in take(ahead.executor)]


def test_when_all_should_have_ended() -> None:
    ahead = Ahead(tokens=100)
    ahead.add(200)
    assert ahead.begin()
    assert ahead.loop.ends_in_s == pytest.approx(0.1)
    ahead.stream.now = 0.098
    assert ahead.begin()
    assert ahead.loop.ends_in_s == pytest.approx(0.102)
    ahead.stream.now = 0.21
    assert ahead.loop.ends_in_s == pytest.approx(-0.01)


def test_who_looks_seldom_begins_the_sooner() -> None:
    """A device does not wait for a host that is busy elsewhere."""
    ahead = Ahead(tokens=100)
    ahead.add(400)
    assert ahead.begin()
    ahead.stream.now = 0.076
    assert not ahead.begin()
    ahead.stream.now = 0.0835  # at 0.091 it would be later than it may
    assert ahead.begin()


def test_a_host_that_sees_a_step_end_late_begins_the_next_one_in_time() -> None:
    """The host launches a step kernel by kernel, which takes it 30 ms, and the step before ends meanwhile."""
    ahead = Ahead(tokens=100)
    ahead.add(400)
    assert ahead.begin()
    ahead.stream.now = 0.09
    assert ahead.begin()
    ahead.stream.now = 0.12  # the first has ended at 0.1, the second will at 0.2
    assert len(take(ahead.executor)) == 1
    assert ahead.loop.ends_in_s == pytest.approx(0.08)
    ahead.stream.now = 0.165
    assert not ahead.begin()
    ahead.stream.now = 0.192
    assert ahead.begin()


def test_a_step_that_takes_longer_than_predicted_is_not_taken_to_have_ended() -> None:
    ahead = Ahead(tokens=100)
    ahead.scheduler.cost.took([(0, 1)], PACE / 2)  # predicted is the median: 3/4 of what it takes
    ahead.add(300)
    assert ahead.begin()
    ahead.stream.now = 0.074
    assert ahead.begin()
    ahead.stream.now = 0.099
    assert take(ahead.executor) == []
    ahead.stream.now = 0.101
    assert len(take(ahead.executor)) == 1
    assert ahead.loop.ends_in_s == pytest.approx(0.099 + 0.1 - 0.101), "it was seen running at 0.099"


def test_a_long_step_that_ends_earlier_than_predicted_leaves_no_gap() -> None:
    ahead = Ahead(tokens=100)
    ahead.scheduler.cost.took([(0, 1)], 1.16 * PACE)  # predicted is the median: 8 % too long
    ahead.add(400)
    ahead.begin()
    while len(ahead.stream.rows) < 2:
        ahead.stream.now += 0.001
        ahead.begin()
    assert ahead.stream.now < 0.1


def test_how_long_steps_take_is_the_devices_time() -> None:
    ahead = Ahead(tokens=100, measured=False)
    ahead.add(300)
    ahead.stream.now = 5.0  # nothing to do till then
    ahead.begin()
    ahead.begin()
    ahead.stream.now = 9.0  # ended long before
    take(ahead.executor)
    assert abs(ahead.scheduler.cost.seconds_of(100) - 0.1) < 1e-9


def test_blocks_that_a_step_writes_outlive_a_cancelled_sequence() -> None:
    ahead = Ahead(tokens=40, blocks=31, measured=False)
    sequence = ahead.add(100)
    ahead.begin()
    ahead.scheduler.remove(sequence)
    assert ahead.pools.pinned == 10
    assert ahead.pools.free == ahead.pools.total - 10
    other = ahead.add(20 * BLOCK)
    ahead.begin()
    assert sequence.blocks is not None
    assert other.blocks is not None
    assert not set(other.blocks[0]) & set(sequence.blocks[0][:10])
    ahead.stream.now = 0.04
    assert take(ahead.executor) == []
    assert ahead.pools.free == ahead.pools.total - 20
    ahead.check_blocks()


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 20), marks=pytest.mark.slow)], ids=str)
def test_every_token_is_computed_once_whatever_is_cancelled_meanwhile(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        ahead = Ahead(tokens=draw.choice((7, 40, 100)), blocks=60, measured=draw.random() < 0.5)
        seen: dict[Sequence, int] = {}
        tokens: dict[Sequence, int] = {}
        for _ in range(400):
            if draw.random() < 0.3:
                seen[ahead.add(draw.randint(1, 90))] = 0
            if draw.random() < 0.1 and ahead.scheduler.sequences:
                ahead.scheduler.remove(draw.choice(ahead.scheduler.sequences))
            ahead.stream.now += draw.random() * 0.03
            for result in prefill_step(ahead.executor):
                chunk = result.chunk
                assert chunk.start == seen[chunk.sequence]
                seen[chunk.sequence] += chunk.count
                assert seen[chunk.sequence] <= chunk.sequence.computed <= chunk.sequence.reached
                if result.token is not None:
                    tokens[chunk.sequence] = result.token
                    ahead.scheduler.remove(chunk.sequence)
            ahead.check_blocks()
            if len(ahead.scheduler.sequences) > 40:
                break
        assert tokens
        assert all(token == (s.length - 1) % VOCAB and seen[s] == s.length for s, token in tokens.items())
        for sequence in ahead.scheduler.sequences:
            ahead.scheduler.remove(sequence)
        ahead.stream.now += 100
        take(ahead.executor)
        assert ahead.pools.free == ahead.pools.total
        assert ahead.pools.pinned == 0


def test_in_turn_with_decode_steps_the_next_is_begun_when_the_last_has_ended() -> None:
    """The decode step that is enqueued between them is what the device does meanwhile."""
    ahead = Ahead(tokens=100)
    ahead.loop.state.in_turn = ahead.scheduler.beside_decode = True
    ahead.add(400)
    ahead.stream.free_at = 0.03  # the decode step that runs
    assert ahead.begin()
    ahead.stream.now = 0.02
    assert take(ahead.executor) == []
    assert ahead.loop.ends_in_s == math.inf, "it has not begun"
    assert ahead.loop.ending(1.0) is None
    ahead.stream.now = 0.03
    assert take(ahead.executor) == []
    assert ahead.loop.ends_in_s == pytest.approx(0.1)
    ahead.stream.now = 0.129
    assert not ahead.begin()
    ahead.stream.now = ahead.stream.free_at = 0.14  # a decode step ran since 0.13
    assert len(take(ahead.executor)) == 1
    assert ahead.begin()
    assert take(ahead.executor) == []
    ahead.scheduler.beside_decode = False
    ahead.stream.now = 0.239
    assert take(ahead.executor) == []
    assert ahead.begin(), "nothing is decoded any more"
    assert abs(ahead.scheduler.cost.seconds_of(100) - 0.1) < 1e-9
