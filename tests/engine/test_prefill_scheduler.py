"""Chunks under a token budget, in order, and no block lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.blocks import BlockPools
from baton.engine.prefill_scheduler import PrefillScheduler
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.errors import BatonError, ErrorKind
from baton.layout import CacheGroup, Layout, Plane

LAYOUT = Layout((CacheGroup((0,), (Plane("k", "float32", 1, 4),), block_tokens=4),))


def sequence(length: int) -> Sequence:
    return Sequence(tuple(range(length)), length, SamplingParams(), Limits(max_tokens=4))


def make(blocks: int, budget: int, most: int = 100) -> tuple[BlockPools, PrefillScheduler]:
    pools = BlockPools(LAYOUT, [blocks + 1])
    return pools, PrefillScheduler(pools, chunk_tokens=budget, max_sequences=most)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    budget=st.integers(1, 50),
    blocks=st.integers(10, 30),
)
def test_every_token_is_computed_once_in_order_within_the_budget(
    lengths: list[int], budget: int, blocks: int
) -> None:
    pools, scheduler = make(blocks, budget)
    sequences = [sequence(length) for length in lengths]
    for one in sequences:
        scheduler.add(one)
    seen: dict[Sequence, int] = dict.fromkeys(sequences, 0)
    while scheduler.queued_tokens:
        chunks = scheduler.schedule()
        assert chunks
        assert sum(chunk.count for chunk in chunks) <= budget
        for chunk in chunks:
            assert chunk.start == seen[chunk.sequence]
            seen[chunk.sequence] += chunk.count
            scheduler.computed(chunk)
            if chunk.is_last:
                scheduler.remove(chunk.sequence)
        pools.check_integrity([s.blocks for s in scheduler.sequences if s.blocks is not None])
    assert [seen[one] for one in sequences] == lengths
    assert pools.free == pools.total


def test_a_prompt_without_blocks_waits_and_nobody_overtakes_it() -> None:
    pools, scheduler = make(blocks=4, budget=100)
    first, second, third = sequence(12), sequence(8), sequence(4)
    for one in (first, second, third):
        scheduler.add(one)
    (chunk,) = scheduler.schedule()
    assert chunk.sequence is first
    scheduler.computed(chunk)
    assert scheduler.schedule() == []
    scheduler.remove(first)
    assert [c.sequence for c in scheduler.schedule()] == [second, third]
    scheduler.remove(second)
    scheduler.remove(third)
    scheduler.remove(third)
    assert pools.free == pools.total


def test_refusals() -> None:
    _, scheduler = make(blocks=2, budget=8, most=1)
    with pytest.raises(BatonError, match="exceeds") as refused:
        scheduler.add(sequence(9))
    assert refused.value.kind is ErrorKind.INVALID
    scheduler.add(sequence(8))
    with pytest.raises(BatonError) as full:
        scheduler.add(sequence(1))
    assert full.value.kind is ErrorKind.OVERLOADED


def test_lent_blocks_stay_their_lenders() -> None:
    pools, scheduler = make(blocks=4, budget=8)
    lent = pools.allocate(8)
    borrower = sequence(8)
    borrower.blocks, borrower.borrowed = lent, True
    scheduler.add(borrower)
    scheduler.remove(borrower)
    pools.check_integrity([lent])
