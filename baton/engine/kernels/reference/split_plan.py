"""How a step's attention is cut into items: the plain form of what the step's first kernel computes.

A row's context, from its window's first tile to its own token, is cut into equal parts of whole tiles.
Mode `fast` chooses the parts' length so that all rows together make about `wanted` items a KV head, and no
part is shorter than `shortest`: a chip is filled by one long row as by many short ones. Mode `exact` uses
parts of one length, so that a row's cuts depend on its own length alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TILE = 64


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """`fixed`: tokens of a part in mode `exact`, or None. All but `wanted` are multiples of TILE."""

    wanted: int = 12
    shortest: int = 128
    fixed: int | None = None

    def most_items(self, rows: int, pool_tokens: int) -> int:
        """A bound of the items of `rows` rows whose blocks hold `pool_tokens` tokens in all."""
        return rows + (self.wanted if self.fixed is None else pool_tokens // self.fixed + 1)


@dataclass(frozen=True, slots=True)
class Item:
    """Tokens begin:end of one row."""

    row: int
    begin: int
    end: int


def split_items(positions: Sequence[int], window: int | None, policy: SplitPolicy) -> list[list[Item]]:
    """The items of each row, of which each row's token stands at its position (from 0)."""
    starts = [0 if window is None else max(0, p - window + 1) // TILE * TILE for p in positions]
    spans = [p + 1 - start for p, start in zip(positions, starts, strict=True)]
    if policy.fixed is not None:
        parts = [policy.fixed] * len(spans)
    else:
        about = max(policy.shortest, -(-sum(spans) // policy.wanted))
        parts = [_whole_tiles(-(-span // -(-span // about))) for span in spans]
    return [
        [Item(row, begin, min(begin + part, start + span)) for begin in range(start, start + span, part)]
        for row, (start, span, part) in enumerate(zip(starts, spans, parts, strict=True))
    ]


def _whole_tiles(tokens: int) -> int:
    return -(-tokens // TILE) * TILE
