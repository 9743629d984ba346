"""Blocks between workers that split KV heads over different numbers of ranks.

A rank of n holds heads / n consecutive KV heads of every layer and plane, so its block is

    [layer][plane][its heads][token][dim]

and what sender rank s of S and receiver rank r of R have in common is, for each layer and plane, one run of
heads that is contiguous on both sides. Between the two only their common part travels, packed: run after run,
layer after layer, in pieces as any block. Planes of scales are planes like all others; what pads a layer
behind them does not travel. Rank counts must divide the number of heads; more ranks than heads, which would
need replicated heads, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.model_spec.layout import CacheGroup, Plane
from baton.model_spec.split import Split
from kvtransfer.device.kernels.move_plan import WORD_BYTES
from kvtransfer.device.reference import Run


@dataclass(frozen=True, slots=True)
class Common:
    """The common part of one block of two ranks, in words. `group` describes a block with all heads."""

    group: CacheGroup
    sender: Split
    receiver: Split

    def __post_init__(self) -> None:
        if len({plane.heads for plane in self.group.planes}) != 1:
            raise ValueError("the planes of a cache group must have equally many heads")
        for plane in self.group.planes:
            if (size := self._head_bytes(plane)) % WORD_BYTES:
                raise ValueError(f"a head of {size} bytes is not a whole number of words")

    @property
    def heads(self) -> range:
        """The heads that both have; empty where the two need no link."""
        total = self.group.planes[0].heads
        ours, theirs = self.sender.heads(total), self.receiver.heads(total)
        return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))

    @property
    def words(self) -> int:
        """Words of one block's packed common part."""
        a_head = sum(self._head_bytes(plane) for plane in self.group.planes) // WORD_BYTES
        return len(self.group.layers) * len(self.heads) * a_head

    def gather(self, block: int, staging: int, piece_words: int, first_piece: int) -> list[Run]:
        """Runs from the sender's `block` into staging from word `staging` on, cut into pieces of at most
        `piece_words`, numbered from `first_piece`; a piece follows the one before it without a gap."""
        return self._runs(block, self.sender, staging, piece_words, first_piece, to_staging=True)

    def scatter(self, block: int, staging: int, piece_words: int, first_piece: int) -> list[Run]:
        """Runs from staging into the receiver's `block`; the arguments are those of `gather`."""
        return self._runs(block, self.receiver, staging, piece_words, first_piece, to_staging=False)

    def _head_bytes(self, plane: Plane) -> int:
        return self.group.block_tokens * plane.row_bytes

    def _local(self, side: Split) -> CacheGroup:
        """The group as one side has it: with its heads alone."""
        heads = len(side.heads(self.group.planes[0].heads))
        return replace(self.group, planes=tuple(replace(plane, heads=heads) for plane in self.group.planes))

    def _common_runs(self, side: Split) -> Iterator[tuple[int, int]]:
        """Begin and length of the common heads of each layer and plane, in words of one side's block."""
        group, skipped = self._local(side), self.heads.start - side.heads(self.group.planes[0].heads).start
        for layer in range(len(group.layers)):
            for plane, offset in group.plane_offsets():
                head = self._head_bytes(plane)
                begins = layer * group.layer_bytes + offset + skipped * head
                yield begins // WORD_BYTES, len(self.heads) * head // WORD_BYTES

    def _runs(
        self, block: int, side: Split, staging: int, piece_words: int, first_piece: int, *, to_staging: bool
    ) -> list[Run]:
        group = self._local(side)
        runs, packed = [], 0
        for begins, length in self._common_runs(side):
            place, end = block * group.block_bytes // WORD_BYTES + begins, packed + length
            # A run that crosses the end of a piece is two runs, or more.
            while packed < end:
                piece, within = divmod(packed, piece_words)
                part = min(end - packed, piece_words - within)
                there = staging + packed
                source, destination = (place, there) if to_staging else (there, place)
                runs.append(Run(source, destination, part, first_piece + piece, within))
                packed, place = packed + part, place + part
        return runs
