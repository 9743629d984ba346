"""Runs of heads: each byte of a whole block from one place of one rank, or padding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.model_spec.head_runs import HeadRun, head_runs
from baton.model_spec.layout import FP8, CacheGroup, key_value_planes

HEADS, TOKENS = 4, 4


def group_of(dtype: str, heads: int, dim: int) -> CacheGroup:
    return CacheGroup((3, 5), key_value_planes(dtype, heads, dim), TOKENS, window=8)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "dim"), [("bfloat16", 6), (FP8, 16), (FP8, 48)])
def test_runs_cover_a_block_and_each_ranks_heads(dtype: str, dim: int, count: int) -> None:
    group, part = group_of(dtype, HEADS, dim), group_of(dtype, HEADS // count, dim)
    runs = head_runs(group, count)
    end = 0
    for run in runs:
        assert run.whole == end
        end += run.length
    assert end == group.block_bytes
    used = TOKENS * sum(plane.token_bytes for plane in part.planes)
    for rank in range(count):
        mine = sorted((run.place, run.length) for run in runs if run.rank == rank)
        covered = {byte for place, length in mine for byte in range(place, place + length)}
        assert len(covered) == sum(length for _, length in mine)
        assert covered == {
            layer * part.layer_bytes + byte for layer in range(len(part.layers)) for byte in range(used)
        }
    padding = sum(run.length for run in runs if run.rank is None)
    assert padding == len(group.layers) * (group.layer_bytes - used * count)


def test_ranks_have_consecutive_heads() -> None:
    """Two layers of two planes of four heads, of 48 bytes each."""
    group = group_of("bfloat16", HEADS, 6)
    assert head_runs(group, 2)[:3] == (HeadRun(0, 0, 0, 96), HeadRun(1, 0, 96, 96), HeadRun(0, 96, 192, 96))
    assert head_runs(group, 2)[-1] == HeadRun(1, 288, 672, 96)


def test_heads_that_ranks_cannot_have_evenly() -> None:
    with pytest.raises(ValueError, match="rank 0 of 3 cannot have an equal part of 4 heads"):
        head_runs(group_of("bfloat16", HEADS, 6), 3)
    uneven = replace(group_of("bfloat16", HEADS, 6), planes=key_value_planes("bfloat16", 3, 6))
    with pytest.raises(ValueError, match="rank 0 of 2 cannot have an equal part of 3 heads"):
        head_runs(uneven, 2)
