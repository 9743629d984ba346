"""Divides a prompt pass's attention between the paged kernel and the vendor's library. Torch-free.

The library is the faster on long runs, but wants keys and values in one run of memory, and every shape made
ready at start (`baton.device.attention_library`). So it gets, of each chunk that is long enough,

    its own keys         where no cached tokens stand before it, or in place of the diagonal where some do
    its cached prefix    in pieces of a few sizes, gathered from their blocks

and the paged kernel gets all else: short chunks, windows, and what the pieces leave of a prefix. What a row
sees in several parts is joined by the sums of exponentials.

A program of the paged kernel does a few rows with all their keys, one tile after the other. A hundred rows
behind 100,000 tokens are so few programs that most of the chip would wait for them, as long as a thousand
rows take. So such a span is cut along its keys and given to several programs (`KeySplit`); all parts but the
last write to rows of their own, and are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile

# (first position, rows) of a chunk.
Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CallShape:
    """`batch` sequences of `rows` queries each over `keys` keys; causal: query i sees keys 0 to i."""

    batch: int
    rows: int
    keys: int
    causal: bool


@dataclass(frozen=True, slots=True)
class LibraryRule:
    """The shapes that are prepared, and the sizes from which they are worth it.

    A causal call has a multiple of `step` rows. A call over a piece of prefix has `step` rows times one of
    `row_steps` and one of `key_sizes` keys, the largest first. `least_rows`: of a chunk; `least_prefix`:
    tokens before it; `least_pairs`: their product, below which gathering and joining cost more than the
    library saves. `least_alone`: rows of a chunk with fewer tokens before it; up to there the paged kernel
    is as fast, and takes the host less.
    """

    step: int = 256
    least_rows: int = 384
    least_alone: int = 1280
    least_prefix: int = 4096
    least_pairs: int = 1 << 23
    row_steps: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    key_sizes: tuple[int, ...] = (16384, 8192, 4096, 2048)

    @classmethod
    def of(cls, most_rows: int) -> LibraryRule:
        """Chooses the rule for passes of up to `most_rows` rows: a step that makes fewer than a hundred
        shapes."""
        step = 256
        while most_rows > 16 * step:
            step *= 2
        return cls(step=step)

    def least_start(self, rows: int) -> int:
        """Least length of a prefix, in tokens, that is worth a call for `rows` rows."""
        return max(self.least_prefix, -(-self.least_pairs // rows))

    def takes(self, start: int, rows: int) -> bool:
        """True if the library computes a chunk's own keys at all."""
        return rows >= (self.least_rows if start >= self.least_start(rows) else self.least_alone)

    def padded(self, rows: int) -> int:
        """`rows` up to a multiple of the step."""
        return -(-rows // self.step) * self.step

    def row_size(self, rows: int) -> int:
        """Rows of a call over a piece of prefix for `rows` rows; 0 where they are too many."""
        sizes = (steps * self.step for steps in self.row_steps)
        return next((size for size in sizes if size >= rows), 0)

    def slack(self, most_rows: int) -> int:
        """Rows behind `most_rows` that calls may read."""
        gaps = (b - a for a, b in pairwise((0, *self.row_steps)) if a * self.step < most_rows)
        return max(gaps, default=1) * self.step

    def shapes(self, most_rows: int) -> Iterator[CallShape]:
        """The shapes of all calls that passes of up to `most_rows` rows may make."""
        most = self.padded(most_rows)
        for rows in range(self.step, most + 1, self.step):
            yield CallShape(1, rows, rows, True)
        batch = 2
        while most // batch >= self.step and most % (batch * self.step) == 0:
            yield CallShape(batch, most // batch, most // batch, True)
            batch *= 2
        for rows in (steps * self.step for steps in self.row_steps):
            if rows <= self.row_size(most_rows):
                yield from (CallShape(1, rows, keys, False) for keys in self.key_sizes)


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `row` to `row + rows` of a pass, of the sequence whose line of the block tables is `table`. The
    first stands at `position`. They attend to keys `begin` to `end`, each to those up to itself. What they
    yield is written to row `into` and those behind it; None: to their own."""

    row: int
    rows: int
    position: int
    begin: int
    end: int
    table: int
    into: int | None = None


@dataclass(frozen=True, slots=True)
class PartedRows:
    """`count` parts of what `rows` rows from `row` on yield are in as many runs of rows from `first` on."""

    row: int
    rows: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class CausalCall:
    """`batch` chunks of `rows` rows from `row` on, each over its own keys. `real` of the rows are the pass's,
    those behind are padding. `joins`: a span has yielded another part of these rows."""

    row: int
    batch: int
    rows: int
    real: int
    joins: bool


@dataclass(frozen=True, slots=True)
class PrefixCall:
    """Rows from `row` on over the tokens `first` to `first + keys` before their chunk; `real` of the `rows`
    are the chunk's; results of the others are not used."""

    row: int
    rows: int
    real: int
    table: int
    first: int
    keys: int


@dataclass(slots=True)
class AttentionPlan:
    """Spans are computed first, and parted rows joined, then causal calls, then prefix calls: in that order
    every row's first part is written and the others are joined to it."""

    spans: list[Span] = field(default_factory=list)
    parted: list[PartedRows] = field(default_factory=list)
    causal: list[CausalCall] = field(default_factory=list)
    prefix: list[PrefixCall] = field(default_factory=list)

    @property
    def by_library(self) -> bool:
        """True if the library computes any part of it."""
        return bool(self.causal or self.prefix)

    @property
    def alone(self) -> CausalCall | None:
        """The call that yields all rows of the pass, if one does."""
        return self.causal[0] if len(self.causal) == 1 and not (self.spans or self.prefix) else None


def plan_attention(
    chunks: Sequence[Run], rule: LibraryRule | None, has: Callable[[CallShape], bool]
) -> AttentionPlan:
    """`chunks` as they are packed. `rule` None: the library takes nothing (a sliding window, a dtype it has
    not). `has`: whether a shape is ready."""
    plan = AttentionPlan()
    row = index = 0
    while index < len(chunks):
        start, rows = chunks[index]
        batch = 1
        if rule is None or not rule.takes(start, rows):
            plan.spans.append(Span(row, rows, start, 0, start + rows, index))
        elif start == 0 and (batch := _equals(chunks[index:], rule, has)) > 1:
            plan.causal.append(CausalCall(row, batch, rows, rows, False))
        else:
            batch = 1
            _plan_chunk(plan, (row, index), chunks, rule, has)
        row += batch * rows
        index += batch
    return plan


def _equals(chunks: Sequence[Run], rule: LibraryRule, has: Callable[[CallShape], bool]) -> int:
    """Number of chunks from the first on that one call may take, without padding between them."""
    start, rows = chunks[0]
    equal = sum(1 for _ in takewhile(lambda chunk: chunk == (start, rows), chunks))
    if rows % rule.step:
        return 1
    return next((n for n in range(equal, 1, -1) if has(CallShape(n, rows, rows, True))), 1)


def _plan_chunk(
    plan: AttentionPlan,
    place: tuple[int, int],
    chunks: Sequence[Run],
    rule: LibraryRule,
    has: Callable[[CallShape], bool],
) -> None:
    """Plans one chunk by itself; `place`: its first row and its index."""
    row, index = place
    start, rows = chunks[index]
    padded = rule.padded(rows)
    # Padding is rows that are no sequence's: there are some behind the last chunk alone.
    own = (padded == rows or index == len(chunks) - 1) and has(CallShape(1, padded, padded, True))
    calls = _prefix_calls(row, rows, start, index, rule)
    if any(not has(CallShape(1, call.rows, call.keys, False)) for call in calls):
        calls = []
    done = sum(call.keys for call in calls)
    if start and not calls:  # a prefix that is not worth a call: nor is the diagonal beside it
        own = False
    end = start if own else start + rows
    if end > done:
        plan.spans.append(Span(row, rows, start, done, end, index))
    if own:
        plan.causal.append(CausalCall(row, 1, padded, rows, joins=end > done))
    plan.prefix.extend(calls)


def _prefix_calls(row: int, rows: int, start: int, table: int, rule: LibraryRule) -> list[PrefixCall]:
    """All pieces of a prefix of `start` tokens, the largest first; less than the smallest is left."""
    calls: list[PrefixCall] = []
    size, first = rule.row_size(rows), 0
    if start < rule.least_start(rows) or not size:
        return calls
    for keys in rule.key_sizes:
        while start - first >= keys:
            calls.append(PrefixCall(row, size, rows, table, first, keys))
            first += keys
    return calls


@dataclass(frozen=True, slots=True)
class KeySplit:
    """Bounds of cuts along keys. `programs`: that share a pass's spans at best; a part has `least_keys` or
    more, and ends at a multiple of `granularity`; `rows`: of the buffer that parts are written to."""

    programs: int = 4 * 132
    least_keys: int = 1024
    rows: int = 1024
    granularity: int = 256

    def more_items(self, kv_heads: int) -> int:
        """Largest number of items that a split plan has beyond its spans' own."""
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
        """Ends of all parts but the last. Every row sees something of each: none ends behind the first."""
        if parts < 2:
            return []
        size = -(-(span.end - span.begin) // (parts * self.granularity)) * self.granularity
        return list(range(span.begin + size, span.position, size))
