"""The attention of a prompt pass, layer by layer, by its plan: spans by the paged kernel, calls by the
vendor's library, joined where a row has parts of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.device.attention_library import HALF_DTYPES, library_attention
from baton.engine.forward.layer_program import attention_heads
from baton.engine.forward.workspace import Workspace
from baton.engine.kernels.gpu.attention.absorb_attention import absorb_attention
from baton.engine.kernels.gpu.attention.gather_prefix import gather_prefix
from baton.engine.kernels.gpu.attention.items import Heads
from baton.engine.kernels.gpu.attention.join_parts import join_parts
from baton.engine.kernels.gpu.attention.prompt_attention import prompt_attention
from baton.engine.kernels.gpu.attention.prompt_items import ITEM_BEGIN, ITEM_END, ITEM_WIDTH, PromptTuning
from baton.engine.kernels.product_rows import product_rows
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.layers.attention import Attention
from baton.engine.model.modules import Model
from baton.engine.prefill.attention_plan import (
    AttentionPlan,
    CallShape,
    CausalCall,
    KeySplit,
    LibraryRule,
    Run,
    Span,
    plan_attention,
)
from baton.engine.prefill.step_inputs import GroupPlaces, GroupPlan, InputLayout


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """A pass's attention in a cache group: its plan, and on the device what kernels read of it.

    `lines`: where in `tables` [entries, 1] each chunk's begins, and where the last ends; only calls of the
    library need them.
    """

    plan: GroupPlan
    places: GroupPlaces[Tensor]
    tables: Tensor
    lines: Sequence[int]


class PromptAttention:
    """Computes the attention of up to `most_rows` rows; owns the buffers it needs beside the workspace, and
    the library's shapes.

    A pass has its products in the first rows of `workspace.qkv`, and `rule.step` rows of zeros behind them.
    In `workspace.attn_out` the parts of rows whose keys are split stand behind all rows that products have.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        workspace: Workspace,
        most_rows: int,
        rule: LibraryRule | None,
        split: KeySplit,
        most_joined: int = 0,
    ) -> None:
        """`workspace`: as `prompt_workspace` makes it. `most_joined`: rows of other steps that may stand
        behind a pass's own."""
        config = model.config
        self._cache = cache
        self._qkv, self._attn_out = workspace.qkv, workspace.attn_out
        self.rule = rule
        self.heads = attention_heads(model)
        device, dtype = model.device, model.precision.activations
        self._most_rows = product_rows(most_rows + most_joined)
        self._split = split
        rows = self._attn_out.shape[0]
        self.sums = torch.zeros(config.num_heads, rows, dtype=torch.float32, device=device)
        self._scale = config.attention_scale
        keys = rule.key_sizes[0] if rule is not None else 0
        self._gathered = torch.zeros(
            2, config.num_kv_heads, keys, config.head_dim, dtype=dtype, device=device
        )
        shapes = list(rule.shapes(most_rows)) if rule is not None else []
        self._ready = {shape for shape in shapes if self._prepare(shape)}
        # Shapes that the library does not support: the paged kernel computes them, more slowly.
        self.refused = len(shapes) - len(self._ready)

    def plan(self, runs: Sequence[Run], heads: Heads, tuning: PromptTuning) -> GroupPlan:
        """Plans which kernel computes which part of the chunks `runs`, in packed order; `tuning`: of the
        paged kernel."""
        plan = plan_attention(runs, self.rule if heads.window is None else None, self._ready.__contains__)
        if heads.window is None:
            plan = self._split.split(plan, tuning.rows(heads), heads.kv_heads, self._most_rows)
        return GroupPlan(plan, tuning, item_lines(plan.spans, tuning.rows(heads), heads.window))

    def graph_plans(self, rows: int, tuning: PromptTuning | None) -> list[GroupPlan]:
        """Plans of a pass of `rows` rows, padding included, in which the library computes nothing; without
        spans, which are not known at capture."""
        nothing = item_lines([], 1, None)
        return [GroupPlan(AttentionPlan(), tuning or self.tuning(h, rows), nothing) for h in self.heads]

    def graph_layout(self, rows: int, chunks: int, entries: int, plans: Sequence[GroupPlan]) -> InputLayout:
        """The layout of such a pass of up to `chunks` chunks, with `entries` of block tables. Beside the
        items of its rows there is room for either as many as chunks may add, or as splitting keys: a pass
        with most of both is rare."""
        items, joins = [], []
        for plan, heads in zip(plans, self.heads, strict=True):
            split = self._split.more_items(heads.kv_heads) if heads.window is None else 0
            items.append(rows // plan.tuning.rows(heads) + max(chunks, split))
            joins.append(heads.window is None)
        return InputLayout(rows, tuple(items), tuple(joins), entries)

    def tuning(self, heads: Heads, rows: int) -> PromptTuning:
        """The tuning of a pass of `rows` rows of prompts, padding included, so that a graph and the step that
        it is replayed for agree."""
        return PromptTuning.of(heads, self._qkv.dtype, rows)

    def begin(self, rows: int) -> None:
        """Zeroes the rows of the output that `run` may leave as they are; to be called before a pass."""
        self._attn_out[:rows].zero_()

    def run(self, attention: Attention, rows: int, planned: PlannedRows) -> Tensor:
        """Computes a layer's attention → [rows, heads · dim]; results of padding rows are not used. The rows'
        q and k must be rotated, and k and v in the cache; where that holds codes, k and v must be what they
        stand for."""
        group, scales = self._cache.groups[attention.group], self._cache.scales[attention.group]
        plan = planned.plan.attention
        out, sums = self._attn_out[:rows], self.sums[:, :rows]
        if plan.alone is not None:
            found, _ = self._over_own(plan.alone.row, plan.alone.batch, plan.alone.rows)
            found = found.transpose(1, 2).reshape(-1, out.shape[1])
            if found.shape[0] >= rows:
                return found[:rows]
            out[: found.shape[0]].copy_(found)
            return out
        heads, places = self.heads[attention.group], planned.places
        prompt_attention(
            self._attn_out, self._qkv[:rows], group, attention.index, planned.tables, places.items,
            heads, planned.plan.tuning, self.sums if plan.prefix or places.joins is not None else None,
            scales,
        )  # fmt: skip
        if places.joins is not None:
            join_parts(self._attn_out, self.sums, places.joins, heads.dim)
        for causal in plan.causal:
            self._take(causal, out, sums)
        for call in plan.prefix:
            table = planned.tables[planned.lines[call.table] : planned.lines[call.table + 1], 0]
            gather_prefix(self._gathered, group, attention.index, table, call.first, call.keys, scales)
            found, their_sums = self._over_prefix(call.row, call.rows, call.keys)
            self._join(out, sums, call.row, found[0][:, : call.real], their_sums[0][:, : call.real])
        return out

    def _take(self, call: CausalCall, out: Tensor, sums: Tensor) -> None:
        """Writes a causal call's rows, or joins them to what a span has written."""
        found, their_sums = self._over_own(call.row, call.batch, call.rows)
        for number in range(call.batch):
            first = call.row + number * call.rows
            part, part_sums = found[number][:, : call.real], their_sums[number][:, : call.real]
            if call.joins:
                self._join(out, sums, first, part, part_sums)
                continue
            rows = slice(first, first + call.real)
            out[rows].view(call.real, part.shape[0], -1).copy_(part.transpose(0, 1))
            sums[:, rows].copy_(part_sums)

    def _join(self, out: Tensor, sums: Tensor, first: int, part: Tensor, part_sums: Tensor) -> None:
        rows = slice(first, first + part.shape[1])
        absorb_attention(out[rows], sums[:, rows], part, part_sums)

    def _over_own(self, row: int, batch: int, rows: int) -> tuple[Tensor, Tensor]:
        heads = self.heads[0]
        query = self._heads_of(row, batch, rows, 0, heads.heads)
        key = self._heads_of(row, batch, rows, heads.heads, heads.kv_heads)
        value = self._heads_of(row, batch, rows, heads.heads + heads.kv_heads, heads.kv_heads)
        return library_attention(query, key, value, self._scale, causal=True)

    def _over_prefix(self, row: int, rows: int, keys: int) -> tuple[Tensor, Tensor]:
        query = self._heads_of(row, 1, rows, 0, self.heads[0].heads)
        key, value = self._gathered[:, None, :, :keys]
        return library_attention(query, key, value, self._scale, causal=False)

    def _heads_of(self, row: int, batch: int, rows: int, first: int, count: int) -> Tensor:
        """[batch, count, rows, dim] of the product, where it is."""
        dim, width = self.heads[0].dim, self._qkv.shape[1]
        if row + batch * rows > self._qkv.shape[0]:
            raise ValueError(f"rows {row} to {row + batch * rows} of {self._qkv.shape[0]}")
        return self._qkv.as_strided(
            (batch, count, rows, dim), (rows * width, dim, width, 1), row * width + first * dim
        )

    def _prepare(self, shape: CallShape) -> bool:
        """Runs a call like those to come; False where the library refuses it."""
        try:
            if shape.causal:
                self._over_own(0, shape.batch, shape.rows)
            else:
                self._over_prefix(0, shape.rows, shape.keys)
        except RuntimeError:
            return False
        return True


def prompt_workspace(
    model: Model, most_rows: int, rule: LibraryRule | None, split: KeySplit, most_joined: int = 0
) -> Workspace:
    """The workspace of passes of up to `most_rows` rows and `most_joined` of other steps, with the further
    rows that attention needs."""
    slack = 0 if rule is None else rule.slack(most_rows)
    rows = product_rows(most_rows + most_joined)
    return Workspace(model, rows, more_qkv=slack, more_attn_out=split.rows)


def library_rule(model: Model, most_rows: int) -> LibraryRule | None:
    """The rule where the library may be of use: half dtypes on a GPU, and heads whose rows are aligned."""
    fits = model.precision.activations in HALF_DTYPES and model.config.head_dim % 8 == 0
    return LibraryRule.of(most_rows) if fits and model.device.type == "cuda" else None


def item_lines(spans: Iterable[Span], rows: int, window: int | None) -> npt.NDArray[np.int32]:
    """Cuts the spans into items [I, ITEM_WIDTH] of at most `rows` rows, those with the most keys first."""
    lines = []
    for span in spans:
        for first in range(0, span.rows, rows):
            count, position = min(rows, span.rows - first), span.position + first
            begin = span.begin if window is None else max(span.begin, position - window + 1)
            end = min(span.end, position + count)
            into = (span.row if span.into is None else span.into) + first
            lines.append((span.row + first, count, position, begin, end, span.table, into, 0))
    lines.sort(key=lambda line: line[ITEM_BEGIN.value] - line[ITEM_END.value])
    return np.array(lines, dtype=np.int32).reshape(-1, ITEM_WIDTH.value)
