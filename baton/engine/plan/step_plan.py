"""The work of one launch as plain data: chunks of prompts, rows of a decode step, or both together.

A plan is made from what is known at one moment and changes nothing; launching it does
(`baton.engine.executor`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from baton.engine.plan.prefill_step import PrefillStep, StepChunk
from baton.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `start + count` of one sequence."""

    sequence: Sequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        return self.start + self.count == self.sequence.length

    def inputs(self) -> StepChunk:
        """Returns what a forward pass needs of it. Raises ValueError where the sequence has no blocks."""
        sequence = self.sequence
        if sequence.blocks is None:
            raise ValueError("a chunk's sequence has no blocks")
        token_ids = sequence.token_ids[self.start : self.start + self.count]
        return StepChunk(self.start, token_ids, sequence.blocks)

    def __repr__(self) -> str:
        return f"{self.start}+{self.count} of {self.sequence.length}"


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of a decode step. `batch`: the number of rows that the step is launched with, those of no slot
    included. `simple`: every slot's request is greedy or has a temperature and nothing else, so that the
    quicker sampler does. `drafts`: rows beyond one a slot verify drafts; else they are of no slot."""

    batch: int
    simple: bool = True
    drafts: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch. `chunks`: of different prompts, in the order of their rows; empty: a decode step by itself.
    `decode`: the rows of a decode step, which shares the launch where there are chunks, too; None: no decode
    step. `reason`: why now, for a reader.

    For plans with chunks: `expected_s`: predicted seconds of all of it; `decode_s`: what the decode step
    would take by itself; both 0 before anything was measured. `follows`: it runs right behind a launch of
    both, with no decode step between. `more_waits`: prompts that have blocks are left over for the next one.
    """

    chunks: tuple[Chunk, ...] = ()
    decode: DecodeRows | None = None
    reason: str = ""
    expected_s: float = 0.0
    decode_s: float = 0.0
    follows: bool = False
    more_waits: bool = False

    @property
    def is_mixed(self) -> bool:
        """True where prompts and a decode step share the launch."""
        return bool(self.chunks) and self.decode is not None

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Pairs (first position, rows) of the chunks."""
        return [(chunk.start, chunk.count) for chunk in self.chunks]

    def __str__(self) -> str:
        parts = []
        if self.chunks:
            rows = sum(chunk.count for chunk in self.chunks)
            parts.append(f"prefill {rows} rows ({', '.join(map(repr, self.chunks))})")
        if self.decode is not None:
            sampler = "simple" if self.decode.simple else "full"
            drafts = " with drafts" if self.decode.drafts else ""
            parts.append(f"decode batch {self.decode.batch}{drafts} ({sampler} sampler)")
        expected = f", {self.expected_s * 1e3:.2f} ms" if self.expected_s else ""
        return f"{' + '.join(parts) or 'nothing'}{expected}: {self.reason}"


@lru_cache(maxsize=1024)
def decode_alone(rows: DecodeRows, reason: str) -> StepPlan:
    """The plan of a decode step by itself; the same object each time, since one is made a step."""
    return StepPlan(decode=rows, reason=reason)


def step_of(chunks: Iterable[Chunk]) -> PrefillStep:
    """The data of a forward pass over these chunks."""
    return PrefillStep(tuple(chunk.inputs() for chunk in chunks))
