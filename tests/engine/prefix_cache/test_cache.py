"""The prefix cache's accounting against a brute-force model: references, tiers, publication, each step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.memory.blocks import OutOfBlocksError
from baton.engine.plan.prefill_scheduler import PrefillScheduler, StepBounds
from baton.engine.plan.step_plan import Chunk
from baton.engine.sequence import Limits, SamplingParams, Sequence
from tests.engine.plan.prompts_planned import launched, planned
from tests.engine.prefix_driver import BLOCK, Driver


@pytest.mark.parametrize(("groups", "store"), [(1, 10), (2, 10), (1, 0)])
def test_random_requests_agree_with_the_model(groups: int, store: int) -> None:
    drive(groups, store, requests=200)


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "store"), [(1, 10), (2, 10), (1, 0)])
def test_ten_thousand_random_requests_agree_with_the_model(groups: int, store: int) -> None:
    drive(groups, store, requests=10_000)


def drive(groups: int, store: int, requests: int) -> None:
    driver = Driver(seed=groups + store, groups=groups, store=store)
    while driver.requests < requests:
        driver.step()
    driver.run_out()
    assert driver.did["hits"] > requests // 4
    assert driver.pools.cached.evicted > requests // 4
    assert (driver.did["from the store"] > 0) == (driver.did["spoilt"] > 0) == bool(store)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups=st.integers(1, 3),
    blocks=st.integers(10, 40),
    store=st.integers(0, 12),
    steps=st.integers(1, 150),
)
def test_any_worker_agrees_with_the_model(
    seed: int, groups: int, blocks: int, store: int, steps: int
) -> None:
    driver = Driver(seed, groups=groups, blocks=blocks, store=store)
    for _ in range(steps):
        driver.step()
    driver.run_out()


def test_a_block_that_a_transfer_reads_is_not_evicted() -> None:
    """The block's sequence has ended, and every block is wanted."""
    driver = Driver(0, blocks=4, store=0)
    pools = driver.pools
    tables = pools.allocate(3 * BLOCK)
    for number, block in enumerate(tables[0]):
        driver.memory.write((block,), str(number))
    driver.cache.add(driver.cache.hashes_of(range(3 * BLOCK)), tables)
    pinned = tables[0][1]
    pools.pools[0].pin(pinned)
    pools.release(tables)
    assert pools.available() == (3,)
    with pytest.raises(OutOfBlocksError):
        pools.allocate(4 * BLOCK)
    others = pools.allocate(3 * BLOCK)
    assert pinned not in others[0]
    assert len(pools.cached) == 1
    pools.pools[0].unpin(pinned)
    assert pools.available() == (1,)
    assert pools.allocate(BLOCK) == ((pinned,),)
    assert len(pools.cached) == 0


def test_a_chunk_starts_behind_what_is_cached() -> None:
    driver = Driver(0, blocks=20, store=0)
    scheduler = PrefillScheduler(driver.pools, StepBounds(5), max_sequences=4, prefixes=driver.cache)
    starts = []
    for length in (10, 11, 12, 13):
        one = prompt(driver, length)
        scheduler.add(one)
        chunks: list[Chunk] = []
        while one.computed < one.length:
            chunks += launched(scheduler)
            scheduler.computed(chunks[-1])
        assert sum(chunk.count for chunk in chunks) == length - one.cached
        starts.append(chunks[0].start)
        scheduler.remove(one)
    assert starts == [0, 9, 9, 12]
    assert driver.pools.free == driver.pools.total


def test_who_is_lent_blocks_starts_beside_those_that_wait_for_some() -> None:
    """Else neither would ever go on: the blocks that one waits for are given back by the other."""
    driver = Driver(0, blocks=6, store=0)
    scheduler = PrefillScheduler(driver.pools, StepBounds(100), max_sequences=4, prefixes=driver.cache)
    borrower, waiting = prompt(driver, 12), prompt(driver, 8)
    borrower.blocks, borrower.borrowed = driver.pools.allocate(12), True
    borrower.lend = lambda prefix: prefix
    scheduler.add(waiting)
    scheduler.add(borrower)
    assert [chunk.sequence for chunk in planned(scheduler)] == [borrower]


def test_blocks_that_come_slower_than_they_are_computed_are_not_waited_for() -> None:
    """The blocks are read all the same: the next prompt finds them."""
    driver = Driver(0, blocks=40, store=10)
    length = 2 * BLOCK + 1
    slower, quicker, unknown = prompt(driver, length), prompt(driver, length), prompt(driver, length)
    driver.store.held = dict.fromkeys(slower.hashes, "one of two")
    driver.store.slow = set(slower.hashes)
    driver.store.seconds_each = 0.002
    assert driver.cache.take_prefix(slower, computed_s=0.001)
    assert slower.cached == 0
    assert not driver.cache.take_prefix(quicker, computed_s=0.003)
    assert not driver.cache.take_prefix(unknown)
    assert driver.store.poll()
    assert driver.store.ready(slower.hashes)[0] == 1


def prompt(driver: Driver, length: int) -> Sequence:
    one = Sequence(tuple(range(length)), length, SamplingParams(), Limits(max_tokens=4))
    one.hashes = driver.cache.hashes_of(one.token_ids)
    return one
