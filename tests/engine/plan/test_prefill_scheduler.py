"""Chunks within a step's bounds, the shortest first, none starved, and no block lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.base.errors import BatonError, ErrorKind
from baton.engine.memory.block_pools import BlockPools
from baton.engine.plan.chunk_sizes import LEAST_UNITS, SLACK
from baton.engine.plan.prefill_scheduler import (
    AGED_PASSES,
    AGED_SHARE,
    LATELY_S,
    PATIENT_STEPS,
    PrefillScheduler,
    StepBounds,
)
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.model_spec.layout import CacheGroup, Layout, Plane
from baton.perf_model.prefill_fit import PrefillFit
from baton.perf_model.row_times import RowTimes
from tests.engine.plan.prompts_planned import launched, planned

LAYOUT = Layout((CacheGroup((0,), (Plane("k", "float32", 1, 4),), block_tokens=4),))


def sequence(length: int) -> Sequence:
    return Sequence(tuple(range(length)), length, SamplingParams(), Limits(max_tokens=4))


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    blocks: int,
    bounds: StepBounds,
    most: int = 100,
    cost: PrefillFit | None = None,
    clock: Clock | None = None,
) -> tuple[BlockPools, PrefillScheduler]:
    pools = BlockPools(LAYOUT, [blocks + 1])
    scheduler = PrefillScheduler(pools, bounds, max_sequences=most, cost=cost, clock=clock or Clock())
    return pools, scheduler


def paced(seconds_a_unit: float, half_context: float = 1000.0) -> PrefillFit:
    cost = PrefillFit(half_context)
    cost.took([(0, 1)], seconds_a_unit)
    return cost


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=8),
    tokens=st.integers(3, 150),
    milliseconds=st.floats(1, 400),
    blocks=st.integers(40, 120),
    stair=st.sampled_from([0, 8, 32]),
    others=st.integers(0, 9),
    graph_rows=st.sampled_from([0, 20, 60]),
    age_cap_s=st.sampled_from([0.0, 0.3, 1e9]),
)
def test_every_token_is_computed_once_in_order_within_the_bounds(
    lengths: list[int],
    tokens: int,
    milliseconds: float,
    blocks: int,
    stair: int,
    others: int,
    graph_rows: int,
    age_cap_s: float,
) -> None:
    cost, clock = paced(0.001), Clock()
    bounds = StepBounds(tokens, milliseconds / 1e3, age_cap_s)
    pools, scheduler = make(blocks, bounds, cost=cost, clock=clock)
    scheduler.graph_rows, scheduler.tpot_limit_s = graph_rows, 0.05
    if stair:
        rows = range(4, 164, 4)
        scheduler.row_times = RowTimes(tuple(rows), tuple(math.ceil(each / stair) for each in rows))
    sequences = [sequence(length) for length in lengths]
    for one in sequences:
        scheduler.add(one)
        clock.now += 0.01
    seen: dict[Sequence, int] = dict.fromkeys(sequences, 0)
    while scheduler.queued_tokens:
        clock.now += 0.05
        chunks = launched(scheduler, others)
        assert chunks
        count = sum(chunk.count for chunk in chunks)
        assert count <= tokens
        units = sum(cost.of(chunk.start, chunk.count) for chunk in chunks)
        assert units <= max(milliseconds, LEAST_UNITS) * (1 + SLACK) + 1e-6
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            assert chunk.start == seen[chunk.sequence]
            seen[chunk.sequence] += chunk.count
            scheduler.computed(chunk)
            if chunk.is_last:
                scheduler.remove(chunk.sequence)
        pools.check_integrity([s.blocks for s in scheduler.sequences if s.blocks is not None])
    assert [seen[one] for one in sequences] == lengths
    assert pools.free == pools.total


def test_rows_that_products_are_slow_with_are_left_to_a_step_that_there_is_anyway() -> None:
    _, scheduler = make(1000, StepBounds(100))
    scheduler.row_times = RowTimes((64, 80, 100), (1.0, 1.9, 2.0))
    one, two = sequence(70), sequence(300)
    scheduler.add(one)
    assert [chunk.count for chunk in planned(scheduler)] == [70], "none waits behind it"
    scheduler.add(two)
    assert [(c.sequence, c.count) for c in planned(scheduler)] == [(one, 64)]
    assert [chunk.count for chunk in planned(scheduler, 10)] == [54], "with 10 others it is 64 rows"
    scheduler.row_times = RowTimes((64, 80, 100), (1.0, 1.2, 1.3))
    assert [(c.sequence, c.count) for c in planned(scheduler)] == [(one, 70), (two, 30)]


@pytest.mark.parametrize(
    ("limit_s", "others", "counts"),
    [
        (0.09, 16, [84]),
        (0.083, 16, [100, 200]),
        (math.inf, 16, [100, 200]),
        (0.09, 0, [100]),
        (0.09, 100, [100, 200]),
    ],
)
def test_steps_are_one_graph_with_rows_that_have_time_for_each(
    limit_s: float, others: int, counts: list[int]
) -> None:
    """84 rows and 16 others are one graph, of 84 ms."""
    _, scheduler = make(1000, StepBounds(300, seconds=1.0), cost=paced(0.001))
    scheduler.graph_rows, scheduler.beside_decode, scheduler.tpot_limit_s = 100, True, limit_s
    scheduler.add(sequence(100))
    assert [chunk.count for chunk in planned(scheduler, others)] == [100], "none waits behind it"
    scheduler.add(sequence(900))
    assert [chunk.count for chunk in planned(scheduler, others)] == counts
    assert scheduler.waiting_rows == 1000


@pytest.mark.parametrize(("half_context", "rows"), [(1000.0, 100), (100.0, 300)])
def test_steps_are_graphs_while_several_prompts_wait(half_context: float, rows: int) -> None:
    """Unless attention takes much of them."""
    _, scheduler = make(1000, StepBounds(300, seconds=10.0), cost=paced(0.001, half_context))
    scheduler.graph_rows = 100
    one = sequence(1000)
    scheduler.add(one)
    assert [chunk.count for chunk in planned(scheduler)] == [300], "alone"
    scheduler.add(sequence(1200))
    assert [(c.sequence, c.count) for c in planned(scheduler)] == [(one, rows)]
    assert scheduler.waiting_rows == 2200


@pytest.mark.parametrize(
    ("busy_rows", "beside_decode", "prompts"),
    [(800, False, 1), (801, False, 2), (2400, False, 5), (2400, True, 2)],
)
def test_steps_are_longer_than_graphs_that_take_longest_to_read_the_weights(
    busy_rows: int, beside_decode: bool, prompts: int
) -> None:
    """The steps are those of mixtures of experts: short prompts share steps, which have time for rows whose
    arithmetic takes as long."""
    _, scheduler = make(4000, StepBounds(3000, seconds=1.0), cost=paced(0.001, math.inf))
    scheduler.graph_rows, scheduler.beside_decode, scheduler.cost.busy_rows = 800, beside_decode, busy_rows
    for _ in range(6):
        scheduler.add(sequence(500))
    counts = [chunk.count for chunk in planned(scheduler)]
    assert [count for count in counts if count == 500] == [500] * prompts
    assert (sum(counts) == 800) == (busy_rows == 800)


def test_a_prompt_that_is_no_graph_by_itself_is_computed_in_several() -> None:
    _, scheduler = make(1000, StepBounds(300, seconds=1.0), cost=paced(0.001))
    scheduler.graph_rows, scheduler.tpot_limit_s = 100, 0.1
    scheduler.add(sequence(250))
    assert [chunk.count for chunk in planned(scheduler)] == [250]
    assert [chunk.count for chunk in planned(scheduler, 20)] == [80]


def test_chunks_end_at_the_grain_but_the_last_and_those_below_it() -> None:
    _, scheduler = make(1000, StepBounds(100, alignment=32))
    one = sequence(300)
    scheduler.add(one)
    ends = []
    while scheduler.queued_tokens:
        (chunk,) = launched(scheduler)
        scheduler.computed(chunk)
        ends.append(one.computed)
    assert ends == [96, 192, 288, 300]
    _, scheduler = make(1000, StepBounds(20, alignment=32))
    scheduler.add(sequence(300))
    assert planned(scheduler)[0].count == 20


def test_the_shortest_remaining_comes_first_and_a_long_one_gets_the_rest() -> None:
    _, scheduler = make(1000, StepBounds(100))
    long, short = sequence(1000), sequence(30)
    scheduler.add(long)
    (chunk,) = launched(scheduler)
    scheduler.computed(chunk)
    scheduler.add(short)
    assert [(c.sequence, c.start, c.count) for c in planned(scheduler)] == [(short, 0, 30), (long, 100, 70)]


def test_what_has_waited_longer_than_the_cap_gets_half_of_every_fourth_step() -> None:
    clock = Clock()
    _, scheduler = make(1000, StepBounds(100, age_cap_s=1.0), clock=clock)
    long = sequence(1000)
    scheduler.add(long)
    clock.now = 0.9
    for _ in range(9):
        scheduler.add(sequence(90))

    def of_long() -> int:
        chunks = launched(scheduler)
        for chunk in chunks:
            chunk.sequence.begun = 0  # each step finds the same prompts
        return next((chunk.count for chunk in chunks if chunk.sequence is long), 0)

    assert [of_long() for _ in range(6)] == [0] * 6
    clock.now = 1.0
    half = math.ceil(100 * AGED_SHARE)
    assert [of_long() for _ in range(2 * AGED_PASSES + 2)] == 2 * [*[0] * AGED_PASSES, half]


def test_a_long_prompt_gets_half_of_a_step_that_others_wait_for() -> None:
    clock = Clock()
    bounds = StepBounds(10_000, seconds=1.0, age_cap_s=1e9)
    _, scheduler = make(20_000, bounds, cost=paced(0.001, math.inf), clock=clock)
    long, short, next_but_one = sequence(50_000), sequence(200), sequence(1000)
    scheduler.add(long)

    def counts() -> dict[Sequence, int]:
        chunks = launched(scheduler)
        found = {chunk.sequence: chunk.count for chunk in chunks}
        for chunk in chunks:
            scheduler.computed(chunk)
            if chunk.is_last:
                scheduler.remove(chunk.sequence)
        return found

    assert counts() == {long: 1000}, "no other prompt arrives"
    scheduler.add(short)
    assert counts() == {short: 200, long: 300}
    assert counts() == {long: 500}, "one has come lately"
    clock.now += 1.1
    assert counts() == {long: 1000}
    scheduler.add(sequence(450))
    assert list(counts().values()) == [450], "what would be left is not worth a chunk"
    for one in (sequence(200), next_but_one):
        scheduler.add(one)
    assert counts()[next_but_one] == 800, "it ends in the next step"


def test_steps_are_long_while_no_short_prompt_comes() -> None:
    clock = Clock()
    bounds = StepBounds(10_000, seconds=1.0, age_cap_s=1e9, alone_seconds=3.0)
    _, scheduler = make(30_000, bounds, cost=paced(0.001, math.inf), clock=clock)

    def counts() -> list[int]:
        chunks = launched(scheduler)
        for chunk in chunks:
            scheduler.computed(chunk)
            if chunk.is_last:
                scheduler.remove(chunk.sequence)
        return [chunk.count for chunk in chunks]

    scheduler.add(sequence(50_000))
    clock.now += 0.1
    scheduler.add(sequence(50_000))
    assert counts() == [3000], "a long one that has come lately does not count"
    short, cached = sequence(300), sequence(5000)
    scheduler.add(short)
    assert counts() == [300, 200]
    assert counts() == [500], "one has come lately"
    clock.now += LATELY_S
    assert counts() == [3000]
    scheduler.beside_decode = True
    assert counts() == [1000], "each step that is decoded beside it takes longer"
    for limit_s, tokens in ((0.3, 1000), (0.75, 1500), (2.0, 3000)):
        scheduler.tpot_limit_s = limit_s
        assert counts() == [tokens], "as far as their limits allow"
    scheduler.beside_decode = False
    cached.computed = cached.cached = 4900
    scheduler.add(cached)
    assert counts() == [100, 400], "what is cached of a prompt does not make it long"
    clock.now += LATELY_S
    last = sequence(3500)
    scheduler.add(last)
    assert counts() == [3000]
    assert counts() == [500, 1000], "the rest of a long one is not short, but ends in half a step"


def test_short_prompts_whose_limits_leave_time_do_not_shorten_steps() -> None:
    clock = Clock()
    bounds = StepBounds(10_000, seconds=1.0, age_cap_s=1e9, alone_seconds=3.0)
    _, scheduler = make(30_000, bounds, cost=paced(0.001, math.inf), clock=clock)
    scheduler.add(sequence(50_000))
    patient = sequence(300)
    patient.first_token_in_s = 3 * PATIENT_STEPS + 1.0
    scheduler.add(patient)
    assert [chunk.count for chunk in planned(scheduler)] == [300, 2700], "all of a step of three seconds"
    clock.now = 0.9
    assert [chunk.count for chunk in planned(scheduler)] == [300, 200], "it has waited"


def test_a_prompt_goes_before_shorter_ones_when_its_limit_requires_it() -> None:
    clock = Clock()
    bounds = StepBounds(10_000, seconds=1.0, age_cap_s=1e9)
    _, scheduler = make(30_000, bounds, cost=paced(0.001, math.inf), clock=clock)
    limited = sequence(900)
    limited.first_token_in_s = 4.0
    shorter = [sequence(800) for _ in range(9)]
    for one in (limited, *shorter):
        scheduler.add(one)
    assert planned(scheduler)[0].sequence is shorter[0], "it has time"
    clock.now = 1.5
    assert planned(scheduler)[0].sequence is limited, "with a step's time to spare"
    clock.now = 3.5
    assert planned(scheduler)[0].sequence is shorter[0], "it is given up"


def test_a_step_predicts_each_prompt_once() -> None:
    class Counted(PrefillFit):
        predicted = 0

        def seconds_of(self, units: float) -> float:
            self.predicted += 1
            return super().seconds_of(units)

    cost = Counted(1000.0)
    cost.took([(0, 1)], 0.001)
    _, scheduler = make(100, StepBounds(50, 0.025), cost=cost)
    for length in (5, 30, 90):
        prompt = sequence(length)
        prompt.first_token_in_s = 1.0
        scheduler.add(prompt)
    scheduler.allocate_blocks(0.0)
    cost.predicted = 0
    scheduler.plan(0.0)
    assert cost.predicted == 3


def test_a_chunk_ends_at_the_next_multiple_where_that_costs_little() -> None:
    bounds = StepBounds(10_000, seconds=0.5, alignment=64)
    _, scheduler = make(1000, bounds, cost=paced(0.001, math.inf))
    scheduler.add(sequence(3000))
    assert [chunk.count for chunk in planned(scheduler)] == [512]
    bounds = StepBounds(10_000, seconds=0.5, alignment=300)
    _, scheduler = make(1000, bounds, cost=paced(0.001, math.inf))
    scheduler.add(sequence(3000))
    assert [chunk.count for chunk in planned(scheduler)] == [300]
    _, scheduler = make(1000, StepBounds(511, seconds=0.5, alignment=64), cost=paced(0.001, math.inf))
    scheduler.add(sequence(3000))
    assert [chunk.count for chunk in planned(scheduler)] == [448], "no more rows than a pass has"


def test_what_little_is_left_of_a_prompt_is_no_step_of_its_own() -> None:
    clock, bounds = Clock(), StepBounds(10_000, seconds=1.0)
    _, scheduler = make(20_000, bounds, cost=paced(0.001, math.inf), clock=clock)
    for tokens, counts in {1125: [1125], 1126: [1000, 126]}.items():
        clock.now += 10  # no other prompt has arrived lately
        one = sequence(tokens)
        scheduler.add(one)
        for count in counts:
            (chunk,) = launched(scheduler)
            assert chunk.count == count
            scheduler.computed(chunk)
        scheduler.remove(one)
    several = [sequence(n) for n in (990, 60, 60, 60)]
    for one in several:
        scheduler.add(one)
    assert sum(chunk.count for chunk in planned(scheduler)) == 180 + 820, "the slack is the step's, once"


def test_a_prompt_without_blocks_lets_no_longer_one_start_and_an_old_one_none() -> None:
    clock = Clock()
    pools, scheduler = make(4, StepBounds(100, age_cap_s=1.0), clock=clock)
    first, long, longer, short = sequence(8), sequence(12), sequence(16), sequence(4)
    scheduler.add(first)
    scheduler.computed(launched(scheduler)[0])
    for one in (long, longer, short):
        scheduler.add(one)
    (chunk,) = launched(scheduler)
    assert chunk.sequence is short, "it passes those that lack blocks"
    scheduler.computed(chunk)
    scheduler.remove(short)
    clock.now = 2.0
    scheduler.remove(first)
    another = sequence(4)
    pools.allocate(4)  # three are left: enough for `long`, not for both
    scheduler.add(another)
    assert [c.sequence for c in planned(scheduler)] == [long], "it waited too long to be passed again"


def test_refusals() -> None:
    _, scheduler = make(2, StepBounds(8), most=1)
    with pytest.raises(BatonError, match="exceeds") as refused:
        scheduler.add(sequence(9))
    assert refused.value.kind is ErrorKind.CONFLICT
    scheduler.add(sequence(8))
    with pytest.raises(BatonError) as full:
        scheduler.add(sequence(1))
    assert full.value.kind is ErrorKind.OVERLOADED


def test_lent_blocks_stay_their_lenders() -> None:
    pools, scheduler = make(4, StepBounds(8))
    lent = pools.allocate(8)
    borrower = sequence(8)
    borrower.blocks, borrower.borrowed = lent, True
    scheduler.add(borrower)
    scheduler.remove(borrower)
    scheduler.remove(borrower)
    pools.check_integrity([lent])
