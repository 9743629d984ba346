"""One prefill step as plain data: all that a forward pass needs to know of its chunks. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.memory.blocks import BlockTables
from baton.model_spec.layout import Layout


@dataclass(frozen=True, slots=True)
class StepChunk:
    """`token_ids` are those of one sequence from position `start` on; `blocks`: all of the sequence's
    blocks, by cache group."""

    start: int
    token_ids: tuple[int, ...]
    blocks: BlockTables

    @property
    def count(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Chunks in the order in which their rows are packed."""

    chunks: tuple[StepChunk, ...]

    @property
    def rows(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Pairs (first position, rows) of the chunks."""
        return [(chunk.start, chunk.count) for chunk in self.chunks]

    @classmethod
    def on_scratch(cls, layout: Layout, start: int, token_ids: Sequence[int]) -> PrefillStep:
        """Rows from position `start` on that read and write the scratch block alone: for warming up."""
        end = start + len(token_ids)
        blocks = tuple((0,) * group.blocks_for(end) for group in layout.groups)
        return cls((StepChunk(start, tuple(token_ids), blocks),))
