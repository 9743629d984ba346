"""Blocks of a worker of several devices: outside of it they are those of one device, to the byte."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from baton.engine.memory.host_blocks import HostBlocks
from baton.engine.memory.kv_cache import KVCache
from baton.engine.memory.split_cache import SplitKVCache
from baton.model_spec.layout import FP8, CacheGroup, Layout, key_value_planes
from baton.model_spec.split import Split, splits

HEADS, BLOCKS = 4, 3
# More than are moved at once.
MANY = 37


def layout_of(dtype: str, heads: int, dim: int) -> Layout:
    """Two cache groups; with 48 dimensions and scales their layers are padded."""
    planes = key_value_planes(dtype, heads, dim)
    return Layout((CacheGroup((0, 2), planes, 4), CacheGroup((1,), planes, 4, window=8)))


def caches(
    dtype: str, dim: int, count: int, blocks: int = BLOCKS, devices: Sequence[str] = ("cpu",)
) -> tuple[KVCache, SplitKVCache]:
    """A cache of one CPU, with random contents, and an empty one of `count` devices."""
    layout = layout_of(dtype, HEADS, dim)
    whole = KVCache(layout, blocks, "cpu")
    generator = torch.Generator().manual_seed(count)
    for values, scales in zip(whole.groups, whole.scales, strict=True):
        values.copy_(torch.randn(values.shape, generator=generator))
        if scales is not None:
            scales.copy_(torch.rand(scales.shape, generator=generator))
    part = layout_of(dtype, HEADS // count, dim)
    ranks = [KVCache(part, blocks, devices[rank % len(devices)]) for rank in range(count)]
    return whole, SplitKVCache(layout, ranks)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "dim"), [("float32", 8), ("bfloat16", 5), (FP8, 16), (FP8, 48)])
def test_whole_blocks_have_the_bytes_of_one_device(dtype: str, dim: int, count: int) -> None:
    whole, split = caches(dtype, dim, count)
    for number, group in enumerate(whole.layout.groups):
        used = group.block_tokens * sum(plane.token_bytes for plane in group.planes)
        assert (used < group.layer_bytes) == (dim == 48)
        size = group.block_bytes
        for rank, cache in zip(splits(count), split.ranks, strict=True):
            mine = slice(rank.heads(HEADS).start, rank.heads(HEADS).stop)
            cache.groups[number].copy_(whole.groups[number][:, :, :, mine])
            theirs, scales = cache.scales[number], whole.scales[number]
            if theirs is not None and scales is not None:
                theirs.copy_(scales[:, :, mine])
        for block in range(BLOCKS):
            assert bytes(split.read_block(number, block, 0, size)) == bytes(
                whole.read_block(number, block, 0, size)
            )


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("dtype", "dim"), [("float32", 8), (FP8, 5), (FP8, 48)])
def test_pieces_are_scattered_to_the_devices_that_have_their_heads(dtype: str, dim: int, count: int) -> None:
    whole, split = caches(dtype, dim, count)
    for number, group in enumerate(whole.layout.groups):
        size, block = (
            group.block_bytes,
            whole.read_block(number, 1, 0, whole.layout.groups[number].block_bytes),
        )
        for cuts in ((0, size), (0, size // 3, size // 2, size)):
            for cache in split.ranks:
                cache.storage[number].zero_()
            for begin, end in itertools.pairwise(cuts):
                split.write_block(number, 2, begin, block[begin:end])
            assert bytes(split.read_block(number, 2, 0, size)) == bytes(block)
            for rank, cache in zip(splits(count), split.ranks, strict=True):
                mine = slice(rank.heads(HEADS).start, rank.heads(HEADS).stop)
                values = whole.groups[number][1, :, :, mine].float()
                assert torch.equal(cache.groups[number][2].float(), values)
                assert not cache.storage[number][:2].any()  # other blocks are as they were


def test_what_is_read_is_a_copy() -> None:
    _, split = caches("float32", 8, 2)
    split.put(0, 1, 0, torch.ones(64, dtype=torch.uint8))
    before = split.read_block(0, 1, 0, 64)
    split.put(0, 1, 0, torch.zeros(64, dtype=torch.uint8))
    assert bytes(before) == b"\1" * 64


def test_host_memory_holds_blocks_that_any_split_loads() -> None:
    whole, two = caches(FP8, 48, 2)
    _, four = caches(FP8, 48, 4)
    sizes = [group.block_bytes for group in whole.layout.groups]
    first, second, third = (HostBlocks(cache, 2 * sum(sizes)) for cache in (whole, two, four))
    saved, _ = first.save(((1,), (2,)))
    data = first.bytes_of(saved)
    second.load(second.save_bytes(data), ((2,), (1,)))
    moved, _ = second.save(((2,), (1,)))
    assert second.bytes_of(moved) == data
    third.load(third.save_bytes(data), ((1,), (2,)))
    for group, block in enumerate((1, 2)):
        assert bytes(four.read_block(group, block, 0, sizes[group])) == bytes(
            whole.read_block(group, block, 0, sizes[group])
        )


def test_many_blocks_are_saved_and_loaded_at_once() -> None:
    whole, two = caches(FP8, 48, 2, MANY + 1)
    saves_and_loads(whole, two)


def saves_and_loads(whole: KVCache, split: SplitKVCache) -> None:
    """All blocks but one through host memory and back, in another order."""
    groups = range(len(whole.layout.groups))
    sizes = [group.block_bytes for group in whole.layout.groups]
    for group in groups:
        for block in range(1, MANY + 1):
            split.write_block(group, block, 0, whole.read_block(group, block, 0, sizes[group]))
    host = HostBlocks(split, (MANY + 1) * sum(sizes))
    tables = tuple(tuple(random.Random(group).sample(range(1, MANY + 1), MANY)) for group in groups)
    saved, copied = host.save(tables)
    copied.synchronize()
    wanted = (bytes(whole.read_block(g, block, 0, sizes[g])) for g in groups for block in tables[g])
    assert host.bytes_of(saved) == b"".join(wanted)
    back = tuple(table[::-1] for table in tables)
    host.load(saved, back).synchronize()
    for group in groups:
        for block, origin in zip(back[group], tables[group], strict=True):
            assert bytes(split.read_block(group, block, 0, sizes[group])) == bytes(
                whole.read_block(group, origin, 0, sizes[group])
            )


@pytest.mark.multigpu
@pytest.mark.parametrize(("dtype", "dim"), [("bfloat16", 64), (FP8, 5), (FP8, 48)])
def test_blocks_of_two_gpus(dtype: str, dim: int) -> None:
    """Moved by kernels of the first, which allocate nothing."""
    whole, split = caches(dtype, dim, 2, MANY + 1, ("cuda:0", "cuda:1"))
    before = allocations()
    saves_and_loads(whole, split)
    for group, size in enumerate(each.block_bytes for each in whole.layout.groups):
        for begin, end in ((0, size), (0, size // 3), (size // 3, size // 2), (size - 5, size)):
            split.write_block(group, 2, begin, whole.read_block(group, 1, begin, end - begin))
            assert bytes(split.read_block(group, 2, begin, end - begin)) == bytes(
                whole.read_block(group, 1, begin, end - begin)
            )
    assert allocations() == before


def allocations() -> list[int]:
    """Allocations so far of each GPU's memory."""
    return [torch.cuda.memory_stats(n)["allocation.all.allocated"] for n in range(2)]


def test_odd_heads_are_refused() -> None:
    planes = key_value_planes("bfloat16", 1, 3)
    layout = Layout((CacheGroup((0,), planes, 1),))
    with pytest.raises(ValueError, match="heads of 6 bytes in a block are not whole words of 4"):
        SplitKVCache(layout, [KVCache(layout, 2, "cpu")])


def test_parts_cover_all_and_the_last_is_the_shortest() -> None:
    for size in (1, 5, 8, 97, 320):
        for count in (1, 2, 3, 8):
            parts = [split.of(size) for split in splits(count)]
            assert [item for part in parts for item in part] == list(range(size))
            assert sorted(map(len, parts), reverse=True) == [len(part) for part in parts]
    with pytest.raises(ValueError, match="rank 1 of 3 cannot have an equal part of 8 heads"):
        Split(1, 3).heads(8)
