"""The inputs of a prefill step on a GPU: one array of int32, copied at once, in which everything has a place.

    token ─ position ─ ( line ─ items ─ joins ) a cache group ─ block tables

The places follow from a few numbers (`InputLayout`). A step of its own layout has no more than it needs; one
that a graph runs has the graph's, where it fits, and zeros where it has less: rows without a token, which
write to the scratch block, items without rows, rows without parts.

Block tables stand one behind another, each as long as it is, since one of a long prompt would make those of
a hundred short ones as long. A row's `line` is where its sequence's begins.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from baton.engine.kernels.gpu.attention.join_parts import JOIN_COUNT, JOIN_FIRST, JOIN_STEP, JOIN_WIDTH
from baton.engine.kernels.gpu.attention.prompt_items import ITEM_TABLE, ITEM_WIDTH, PromptTuning
from baton.engine.plan.prefill_step import PrefillStep
from baton.engine.prefill.attention_plan import AttentionPlan

# Tables begin at multiples of this many entries: kernels are compiled again if an address is a multiple of 16
# bytes in one call and not in the next. The first is padding's: the scratch block.
_LINE = 16
# A row that is padding has this token.
_NO_TOKEN = -1
Ints = npt.NDArray[np.int32]
Place = TypeVar("Place", Ints, Tensor)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A cache group's attention of a step: who computes what, and `items` [I, ITEM_WIDTH] of the paged
    kernel's part as it is cut by `tuning`."""

    attention: AttentionPlan
    tuning: PromptTuning
    items: Ints


@dataclass(frozen=True, slots=True)
class GroupPlaces(Generic[Place]):
    """A cache group's views. `line` [rows]; `items` [I, ITEM_WIDTH]; `joins` [rows, JOIN_WIDTH], None where
    no row has parts."""

    line: Place
    items: Place
    joins: Place | None


@dataclass(frozen=True, slots=True)
class Places(Generic[Place]):
    """Views of a run of int32: `token`, `position` [rows]; `tables` [entries, 1], which kernels read as lines
    of one entry each."""

    token: Place
    position: Place
    groups: tuple[GroupPlaces[Place], ...]
    tables: Place


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Layout of the packed input array: `rows` with padding; `items`: places for them, and `joins`: whether
    rows may have parts, each by cache group; `entries` of all block tables."""

    rows: int
    items: tuple[int, ...]
    joins: tuple[bool, ...]
    entries: int

    @property
    def size(self) -> int:
        """Length of the packed input array, in int32."""
        return self.used(self.entries)

    def used(self, entries: int) -> int:
        """Length of the part that is copied when tables have `entries` entries, in int32."""
        lines = _aligned(self.rows) * (2 + len(self.items))
        joins = self.rows * sum(self.joins) * int(JOIN_WIDTH.value)
        return lines + joins + sum(self.items) * int(ITEM_WIDTH.value) + entries

    def places(self, run: Place) -> Places[Place]:
        """Views of a run by this layout. `run` [at least `size`] on the host or on the device. Each place
        begins at a multiple of 16 bytes."""
        ends = 0

        def cut(count: int, width: int = 1) -> Place:
            nonlocal ends
            piece = run[ends : ends + count * width]
            ends += _aligned(count * width)
            return piece if width == 1 else piece.reshape(count, width)

        token, position = cut(self.rows), cut(self.rows)
        groups = tuple(
            GroupPlaces(
                cut(self.rows),
                cut(items, ITEM_WIDTH.value),
                cut(self.rows, JOIN_WIDTH.value) if joins else None,
            )
            for items, joins in zip(self.items, self.joins, strict=True)
        )
        return Places(token, position, groups, cut(self.entries).reshape(self.entries, 1))


class StepInputs:
    """The inputs of one step, on the host. `lines[group]`: where each chunk's block table begins, and behind
    them where the last one ends."""

    def __init__(self, step: PrefillStep, rows: int, plans: Run[GroupPlan]) -> None:
        """`rows`: the step's with padding; `plans`: by cache group."""
        self._chunks = step.chunks
        self.rows = rows
        self.plans = plans
        self._entries = _LINE
        self.lines = [self._lay_out(group) for group in range(len(plans))]

    @property
    def layout(self) -> InputLayout:
        """The smallest layout with places for all of the step."""
        return InputLayout(
            self.rows,
            tuple(len(plan.items) for plan in self.plans),
            tuple(bool(plan.attention.parted) for plan in self.plans),
            self._entries,
        )

    def fits(self, layout: InputLayout) -> bool:
        """True if `layout` has places for all of it."""
        mine = self.layout
        return (
            mine.rows == layout.rows
            and all(a <= b for a, b in zip(mine.items, layout.items, strict=True))
            and all(a <= b for a, b in zip(mine.joins, layout.joins, strict=True))
            and mine.entries <= layout.entries
        )

    def values(self, layout: InputLayout) -> Ints:
        """The front of a run with that layout, up to the last entry of a block table."""
        run = np.zeros(layout.size, dtype=np.int32)
        places = layout.places(run)
        counts = [chunk.count for chunk in self._chunks]
        real = sum(counts)
        tokens = chain.from_iterable(chunk.token_ids for chunk in self._chunks)
        places.token[:real] = np.fromiter(tokens, dtype=np.int32, count=real)
        places.token[real:] = _NO_TOKEN
        starts = np.repeat([chunk.start for chunk in self._chunks], counts)
        first_rows = np.repeat(np.cumsum(counts) - counts, counts)
        places.position[:real] = starts + np.arange(real) - first_rows
        tables = places.tables[:, 0]
        for number, (group, plan) in enumerate(zip(places.groups, self.plans, strict=True)):
            lines = np.array(self.lines[number][:-1], dtype=np.int32)
            group.line[:real] = np.repeat(lines, counts)
            items = group.items[: len(plan.items)]
            items[:] = plan.items
            items[:, ITEM_TABLE.value] = lines[plan.items[:, ITEM_TABLE.value]]
            if group.joins is not None:
                _fill_joins(group.joins, plan.attention)
            for chunk, first in zip(self._chunks, self.lines[number], strict=False):
                table = chunk.blocks[number]
                tables[first : first + len(table)] = table
        return run[: layout.used(self._entries)]

    def _lay_out(self, group: int) -> list[int]:
        lines = [self._entries]
        for chunk in self._chunks:
            lines.append(lines[-1] + -(-len(chunk.blocks[group]) // _LINE) * _LINE)
        self._entries = lines[-1]
        return lines


def _aligned(count: int) -> int:
    """Elements of int32 up to the next multiple of 16 bytes."""
    return -(-count // 4) * 4


def _fill_joins(joins: Ints, plan: AttentionPlan) -> None:
    for run in plan.parted:
        lines = joins[run.row : run.row + run.rows]
        lines[:, JOIN_FIRST.value] = np.arange(run.first, run.first + run.rows)
        lines[:, JOIN_STEP.value] = run.rows
        lines[:, JOIN_COUNT.value] = run.count
