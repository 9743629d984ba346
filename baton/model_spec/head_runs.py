"""The places of a rank's heads in a block as one device would have it.

A whole block is `[layer][plane][all heads][token][dim]`. A rank of n has heads / n consecutive heads of every
layer and plane, so its block is `[layer][plane][its heads][token][dim]`, and what it has of one layer and
plane is one run of bytes in either. What pads a layer behind its planes is on no rank, and zeros in a whole
block, so that a block's bytes do not depend on the split. Torch-free: engine and kvtransfer share it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from baton.model_spec.layout import CacheGroup
from baton.model_spec.split import Split, splits


class HeadRun(NamedTuple):
    """`length` bytes, at byte `whole` of a whole block and at byte `place` of the block of rank `rank`.
    Padding has no rank, and its `place` means nothing."""

    rank: int | None
    place: int
    whole: int
    length: int


def head_runs(group: CacheGroup, count: int) -> tuple[HeadRun, ...]:
    """The runs that cover a whole block, in its order, for `count` ranks. `group`: with all heads. Raises
    ValueError where the ranks cannot have equally many heads."""
    parts = [_part_of(group, split) for split in splits(count)]
    runs: list[HeadRun] = []
    for layer in range(len(group.layers)):
        whole = layer * group.layer_bytes
        for number, (plane, _) in enumerate(group.plane_offsets()):
            for rank, part in enumerate(parts):
                offset = list(part.plane_offsets())[number][1]
                length = plane.token_bytes * group.block_tokens // count
                runs.append(HeadRun(rank, layer * part.layer_bytes + offset, whole, length))
                whole += length
        if padding := (layer + 1) * group.layer_bytes - whole:
            runs.append(HeadRun(None, 0, whole, padding))
    return tuple(runs)


def _part_of(group: CacheGroup, split: Split) -> CacheGroup:
    """The group as a rank has it."""
    planes = [replace(plane, heads=len(split.heads(plane.heads))) for plane in group.planes]
    return replace(group, planes=tuple(planes))
