"""Steps that are launched ahead: what a step's chunks lead to happens when it has ended, and not before."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from baton.device.stream import TimedEvent
from baton.engine.forward.layers import JoinedRows
from baton.engine.memory.block_pools import BlockPools
from baton.engine.prefill.cost import PrefillCost
from baton.engine.prefill.loop import PrefillLoop
from baton.engine.prefill.row_times import RowTimes
from baton.engine.prefill.scheduler import PrefillScheduler, StepBounds
from baton.engine.prefill.step import PrefillStep
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.layout import CacheGroup, Layout, Plane
from bench.engine_driver import prefill_step, take
from tests.support.events import FakeEvent

VOCAB = 11
BLOCK = 4
PACE = 0.001


@dataclass
class SlowEvent(FakeEvent):
    stream: SlowStream
    at: float

    def query(self) -> bool:
        return self.stream.now >= self.at

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, SlowEvent)
        assert self.query()
        return self.at - earlier.at


@dataclass
class SlowStream:
    """A device that takes PACE seconds a row, one step after the other; its time is the test's."""

    asynchronous = True
    in_turn = False
    now: float = 0.0
    free_at: float = 0.0
    rows: list[int] = field(default_factory=list)

    def activate(self) -> contextlib.AbstractContextManager[None]:
        self.free_at = max(self.free_at, self.now)
        return contextlib.nullcontext()

    def record_event(self) -> SlowEvent:
        return SlowEvent(self, self.free_at)

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        return tensor


@dataclass
class NumberedPass:
    """The token behind a row at position p is p modulo the vocabulary."""

    stream: SlowStream
    alignment: int = 1
    refused: int = 0
    uncaptured: str = ""
    graph_rows: int = 0
    timed_passes: None = None
    row_times: RowTimes = field(default_factory=RowTimes)
    joined: list[JoinedRows | None] = field(default_factory=list)

    def forward(self, step: PrefillStep, joined: JoinedRows | None = None) -> Tensor:
        self.joined.append(joined)
        positions = [p for chunk in step.chunks for p in range(chunk.start, chunk.start + chunk.count)]
        self.stream.rows.append(len(positions))
        self.stream.free_at += len(positions) * PACE
        return torch.tensor(positions)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0] % VOCAB, VOCAB).float()


class Ahead:
    """A loop over a slow device."""

    def __init__(self, tokens: int, blocks: int = 200, *, measured: bool = True) -> None:
        planes = (Plane("k", "float32", 1, 4), Plane("v", "float32", 1, 4))
        self.pools = BlockPools(Layout((CacheGroup((0,), planes, BLOCK),)), [blocks])
        cost = PrefillCost()
        if measured:
            cost.took([(0, 1)], PACE)
        bounds = StepBounds(tokens, seconds=1e6)
        self.scheduler = PrefillScheduler(self.pools, bounds, max_sequences=64, cost=cost)
        self.stream = SlowStream()
        self.passes = NumberedPass(self.stream)
        self.loop = PrefillLoop(self.passes, self.scheduler, self.stream, lambda: self.stream.now)

    def add(self, length: int) -> Sequence:
        sequence = Sequence(tuple(range(length)), length, SamplingParams(), Limits(4))
        self.scheduler.add(sequence)
        return sequence

    def check_blocks(self) -> None:
        held = [s.blocks for s in self.scheduler.sequences if s.blocks is not None]
        self.pools.check_integrity(held)


def test_the_next_step_is_begun_before_the_last_has_ended_and_no_third() -> None:
    ahead = Ahead(tokens=100, measured=False)
    sequence = ahead.add(400)
    assert ahead.loop.begin()
    assert ahead.loop.begin()
    assert not ahead.loop.begin()
    assert take(ahead.loop) == []
    assert (sequence.computed, sequence.reached) == (0, 200)
    ahead.stream.now = 0.1
    assert [(r.chunk.start, r.chunk.count) for r in take(ahead.loop)] == [(0, 100)]
    assert (sequence.computed, sequence.reached) == (100, 200)
    ahead.stream.now = 0.199
    assert ahead.loop.begin()
    ahead.stream.now = 0.4
    results = take(ahead.loop)
    assert [r.token for r in results] == [None, None]
    assert ahead.loop.begin()
    ahead.stream.now = 0.5
    assert [r.token for r in take(ahead.loop)] == [399 % VOCAB]
    assert not ahead.loop.begin()
    assert ahead.stream.rows == [100] * 4
    assert not ahead.loop.under_way


def test_an_end_that_is_awaited_is_seen_when_it_comes() -> None:
    """What is reported lies behind the last look at which the step ran."""
    ahead = Ahead(tokens=100)
    ahead.add(100)
    ahead.loop.begin()
    begun = time.monotonic_ns()
    assert not ahead.loop.await_end(0.002)
    assert time.monotonic_ns() - begun > 2e6
    coming = threading.Timer(0.02, setattr, (ahead.stream, "now", 0.1))
    coming.start()
    assert ahead.loop.await_end(5.0)
    seen = time.monotonic_ns()
    (result,) = take(ahead.loop)
    assert result.token == 99 % VOCAB
    assert begun + 2e6 < ahead.loop.ended_after_ns <= seen
    assert ahead.loop.await_end(0.0), "nothing is under way"
    coming.join()


def test_who_comes_late_need_not_wait_for_two_steps() -> None:
    """Once it is known how long steps take, the next is begun just before the last ends."""
    ahead = Ahead(tokens=100)
    ahead.add(400)
    assert ahead.loop.begin()
    for ahead.stream.now in (0.078, 0.082, 0.0855):
        assert not ahead.loop.begin()
    short = ahead.add(5)
    ahead.stream.now = 0.089
    assert ahead.loop.begin()
    ahead.stream.now = 0.2
    assert short in [result.chunk.sequence for result in take(ahead.loop)]


def test_when_all_should_have_ended() -> None:
    ahead = Ahead(tokens=100)
    ahead.add(200)
    assert ahead.loop.begin()
    assert ahead.loop.ends_in_s == pytest.approx(0.1)
    ahead.stream.now = 0.098
    assert ahead.loop.begin()
    assert ahead.loop.ends_in_s == pytest.approx(0.102)
    ahead.stream.now = 0.21
    assert ahead.loop.ends_in_s == pytest.approx(-0.01)


def test_who_looks_seldom_begins_the_sooner() -> None:
    """A device does not wait for a host that is busy elsewhere."""
    ahead = Ahead(tokens=100)
    ahead.add(400)
    assert ahead.loop.begin()
    ahead.stream.now = 0.076
    assert not ahead.loop.begin()
    ahead.stream.now = 0.0835  # at 0.091 it would be later than it may
    assert ahead.loop.begin()


def test_a_host_that_sees_a_step_end_late_begins_the_next_one_in_time() -> None:
    """It launches a step kernel by kernel, which takes it 30 ms, and the one before ends meanwhile."""
    ahead = Ahead(tokens=100)
    ahead.add(400)
    assert ahead.loop.begin()
    ahead.stream.now = 0.09
    assert ahead.loop.begin()
    ahead.stream.now = 0.12  # the first has ended at 0.1, the second will at 0.2
    assert len(take(ahead.loop)) == 1
    assert ahead.loop.ends_in_s == pytest.approx(0.08)
    ahead.stream.now = 0.165
    assert not ahead.loop.begin()
    ahead.stream.now = 0.192
    assert ahead.loop.begin()


def test_a_step_that_takes_longer_than_predicted_is_not_taken_to_have_ended() -> None:
    ahead = Ahead(tokens=100)
    ahead.scheduler.cost.took([(0, 1)], PACE / 2)  # predicted is the median: 3/4 of what it takes
    ahead.add(300)
    assert ahead.loop.begin()
    ahead.stream.now = 0.074
    assert ahead.loop.begin()
    ahead.stream.now = 0.099
    assert take(ahead.loop) == []
    ahead.stream.now = 0.101
    assert len(take(ahead.loop)) == 1
    assert ahead.loop.ends_in_s == pytest.approx(0.099 + 0.1 - 0.101), "it was seen running at 0.099"


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
        ahead.scheduler.cost.row_times = RowTimes((4, 100, 104), (0.01, 0.02, both_s))
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
    ahead.passes.graph_rows, ahead.passes.uncaptured = graph_rows, uncaptured
    ahead.loop.decode = decode = DecodeRows()
    ahead.add(rows)
    assert ahead.loop.begin()
    assert ahead.passes.joined == [decode if joins else None]


def test_a_long_step_that_ends_earlier_than_predicted_leaves_no_gap() -> None:
    ahead = Ahead(tokens=100)
    ahead.scheduler.cost.took([(0, 1)], 1.16 * PACE)  # predicted is the median: 8 % too long
    ahead.add(400)
    ahead.loop.begin()
    while len(ahead.stream.rows) < 2:
        ahead.stream.now += 0.001
        ahead.loop.begin()
    assert ahead.stream.now < 0.1


def test_how_long_steps_take_is_the_devices_time() -> None:
    ahead = Ahead(tokens=100, measured=False)
    ahead.add(300)
    ahead.stream.now = 5.0  # nothing to do till then
    ahead.loop.begin()
    ahead.loop.begin()
    ahead.stream.now = 9.0  # ended long before
    take(ahead.loop)
    assert abs(ahead.scheduler.cost.seconds_of(100) - 0.1) < 1e-9


def test_blocks_that_a_step_writes_outlive_a_cancelled_sequence() -> None:
    ahead = Ahead(tokens=40, blocks=31, measured=False)
    sequence = ahead.add(100)
    ahead.loop.begin()
    ahead.scheduler.remove(sequence)
    assert ahead.pools.pinned == 10
    assert ahead.pools.free == ahead.pools.total - 10
    other = ahead.add(20 * BLOCK)
    ahead.loop.begin()
    assert sequence.blocks is not None
    assert other.blocks is not None
    assert not set(other.blocks[0]) & set(sequence.blocks[0][:10])
    ahead.stream.now = 0.04
    assert take(ahead.loop) == []
    assert ahead.pools.free == ahead.pools.total - 20
    ahead.check_blocks()


def test_every_token_is_computed_once_whatever_is_cancelled_meanwhile() -> None:
    for seed in range(20):
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
            for result in prefill_step(ahead.loop):
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
        take(ahead.loop)
        assert ahead.pools.free == ahead.pools.total
        assert ahead.pools.pinned == 0


def test_in_turn_with_decode_steps_the_next_is_begun_when_the_last_has_ended() -> None:
    """The decode step that is enqueued between them is what the device does meanwhile."""
    ahead = Ahead(tokens=100)
    ahead.stream.in_turn = ahead.scheduler.beside_decode = True
    ahead.add(400)
    ahead.stream.free_at = 0.03  # the decode step that runs
    assert ahead.loop.begin()
    ahead.stream.now = 0.02
    assert take(ahead.loop) == []
    assert ahead.loop.ends_in_s == math.inf, "it has not begun"
    assert ahead.loop.ending(1.0) is None
    ahead.stream.now = 0.03
    assert take(ahead.loop) == []
    assert ahead.loop.ends_in_s == pytest.approx(0.1)
    ahead.stream.now = 0.129
    assert not ahead.loop.begin()
    ahead.stream.now = ahead.stream.free_at = 0.14  # a decode step ran since 0.13
    assert len(take(ahead.loop)) == 1
    assert ahead.loop.begin()
    assert take(ahead.loop) == []
    ahead.scheduler.beside_decode = False
    ahead.stream.now = 0.239
    assert take(ahead.loop) == []
    assert ahead.loop.begin(), "nothing is decoded any more"
    assert abs(ahead.scheduler.cost.seconds_of(100) - 0.1) < 1e-9
