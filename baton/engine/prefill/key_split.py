"""Few rows behind a long prefix: the paged kernel's work on them is given to several programs, by their keys.

A program of that kernel does a few rows with all their keys, one tile after the other. A hundred rows behind
100,000 tokens are so few programs that most of the chip would wait for them, as long as a thousand rows
take. So such a span is cut along its keys; all parts but the last write to rows of their own, and are joined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.engine.prefill.attention_plan import AttentionPlan, PartedRows, Span


@dataclass(frozen=True, slots=True)
class KeySplit:
    """`programs`: that share a pass's spans at best; a part has `least_keys` or more, and ends at a multiple
    of `grain`; `rows`: of the buffer that parts are written to."""

    programs: int = 4 * 132
    least_keys: int = 1024
    rows: int = 1024
    grain: int = 256

    def more_items(self, kv_heads: int) -> int:
        """How many items more than its spans' own a split plan has at most."""
        return self.programs // kv_heads

    def split(self, plan: AttentionPlan, item_rows: int, kv_heads: int, buffer: int) -> AttentionPlan:
        """The plan with its spans cut where that is worth it. `item_rows`: of a program; `buffer`: where the
        rows for parts begin."""
        work = sum(-(-span.rows // item_rows) * kv_heads * (span.end - span.begin) for span in plan.spans)
        share = max(self.least_keys, -(-work // self.programs))
        spans: list[Span] = []
        parted: list[PartedRows] = []
        free, end = buffer, buffer + self.rows
        for span in plan.spans:
            most = 1 + (end - free) // span.rows
            ends = self._cuts(span, min((span.end - span.begin) // share, most))
            first = free
            for cut in ends:
                spans.append(replace(span, end=cut, into=free))
                span = replace(span, begin=cut)
                free += span.rows
            spans.append(span)
            if ends:
                parted.append(PartedRows(span.row, span.rows, first, len(ends)))
        return replace(plan, spans=spans, parted=parted)

    def _cuts(self, span: Span, parts: int) -> list[int]:
        """Where all parts but the last end. Every row sees something of each: none ends behind the first."""
        if parts < 2:
            return []
        size = -(-(span.end - span.begin) // (parts * self.grain)) * self.grain
        return list(range(span.begin + size, span.position, size))
