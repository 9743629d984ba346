"""Reference counts of KV blocks against a brute-force model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.blocks import BlockPool, OutOfBlocksError
from baton.model_spec.layout import CacheGroup, Layout, Plane


class PoolMachine(RuleBasedStateMachine):
    """Random allocations, references and pins; the model is a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.references: Counter[int] = Counter()
        self.pins: Counter[int] = Counter()

    @rule(count=st.integers(0, 10))
    def allocate(self, count: int) -> None:
        free = 8 - len(self.references)
        if count > free:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & set(self.references)
        self.references.update(blocks)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.pool.retain(block)
        self.references[block] += 1

    @precondition(lambda self: self.references - self.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.references - self.pins)))
        self.pool.release(block)
        self._drop(block)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.pool.pin(block)
        self.references[block] += 1
        self.pins[block] += 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.pins)))
        self.pool.unpin(block)
        self.pins -= Counter([block])
        self._drop(block)

    def _drop(self, block: int) -> None:
        self.references -= Counter([block])

    @invariant()
    def agrees(self) -> None:
        assert self.pool.free == 8 - len(self.references)
        assert self.pool.pinned == len(self.pins)
        self.pool.check_integrity((self.references - self.pins).elements())


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_integrity_check_sees_a_leak_and_a_theft() -> None:
    pool = BlockPool(4)
    (first, second) = pool.allocate(2)
    pool.check_integrity([first, second])
    with pytest.raises(RuntimeError, match=f"block {second}"):
        pool.check_integrity([first])
    with pytest.raises(RuntimeError, match="references"):
        pool.check_integrity([first, second, second])


def test_free_blocks_and_scratch_cannot_be_released() -> None:
    pool = BlockPool(4)
    for block in (0, 1):
        with pytest.raises(ValueError, match="no reference"):
            pool.release(block)
    with pytest.raises(ValueError, match="is free"):
        pool.retain(1)
    with pytest.raises(ValueError, match="no pin"):
        pool.unpin(1)


def test_a_sequence_takes_from_all_groups_or_from_none() -> None:
    plane = Plane("k", "float32", 1, 4)
    layout = Layout((CacheGroup((0,), (plane,), 4), CacheGroup((1,), (plane,), 8)))
    pools = BlockPools(layout, [10, 2])
    with pytest.raises(OutOfBlocksError):
        pools.allocate(9)  # 3 blocks of the first group, 2 of the second, which has one
    assert (pools.pools[0].free, pools.pools[1].free) == (9, 1)
    tables = pools.allocate(8)
    assert [len(blocks) for blocks in tables] == [2, 1]
    assert pools.fits_ever(8)
    assert not pools.fits_ever(9)
    pools.check_integrity([tables])
    pools.release(tables)
    assert pools.free == pools.total == 10


def test_what_others_have_too_is_not_freed() -> None:
    plane = Plane("k", "float32", 1, 4)
    pools = BlockPools(Layout((CacheGroup((0,), (plane,), 4), CacheGroup((1,), (plane,), 4))), [9, 9])
    one, other = pools.allocate(12), pools.allocate(4)
    shared = tuple(blocks[:2] for blocks in one)
    for pool, blocks in zip(pools.pools, shared, strict=True):
        for block in blocks:
            pool.retain(block)
    mixed = tuple(mine + new for mine, new in zip(shared, other, strict=True))
    assert pools.freed_with([]) == (0, 0)
    assert pools.freed_with([one]) == pools.freed_with([mixed]) == (1, 1)
    assert pools.freed_with([one, mixed]) == (4, 4)
