"""A prefill step's forward pass by the GPU kernels: chunks of any lengths packed into one run of rows.

    embed ─▶ ( norm ─ qkv ─ q, k, v: norm, rotary, cache ─ attention ─ output + residual
               norm ─ gate, up ─ silu · ─ down + residual ) a layer ─▶ norm

Products are the vendor library's, with the residual added within. All that the host knows of the rows goes
to the device in one copy, and nothing waits for the device. Steps of few rows are graphs of the same launches
(`prefill_graphs`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Run
from statistics import median

import torch
from torch import Tensor

from baton.device.cuda_stream import compute_stream
from baton.device.stream import ComputeStream
from baton.device.upload import put_ints
from baton.engine.forward.gemm import EPILOGUES, Library, Scratch, run_product
from baton.engine.kernels.gpu.attention.prompt_items import PromptTuning
from baton.engine.kernels.gpu.attention.prompt_qkv import prompt_qkv
from baton.engine.kernels.gpu.gemm.gemv import Norm
from baton.engine.kernels.gpu.step.row_ops import embed, norm_rows
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.reference import Decoder, Layer, Linear
from baton.engine.prefill.attention import PlannedRows, PromptAttention, product_rows
from baton.engine.prefill.attention_plan import LibraryRule
from baton.engine.prefill.cost import Pace
from baton.engine.prefill.graphs import GraphBounds, PrefillGraphs
from baton.engine.prefill.key_split import KeySplit
from baton.engine.prefill.scheduler import Chunk
from baton.engine.prefill.step_inputs import GroupPlan, Places, StepInputs
from baton.engine.sequence import Limits, SamplingParams, Sequence

# Prompts that end in one step and whose head is warmed up.
_HEAD_ROWS = 8
# Rows of the small pass whose pace is taken, tries of each pass, and how often its end is looked for.
_FEW_ROWS, _TRIES, _POLL_S = 64, 3, 0.0002


class PrefillPass:
    """Buffers for up to `most_rows` rows, and the launches that fill them. The attention library's plans are
    built here: a part of a second each, for a few dozen."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        most_rows: int,
        rule: LibraryRule | None,
        tuning: PromptTuning | None = None,
        split: KeySplit | None = None,
    ) -> None:
        """`rule`: what the library takes of attention; `tuning` None: by the rows; `split`: when
        few rows' keys are shared by several programs; None: as is best for a large GPU."""
        config, device, dtype = decoder.config, decoder.device, decoder.dtype
        self.most_rows = most_rows
        self._decoder = decoder
        self._cache = cache
        self._tuning = tuning
        self._split = split or KeySplit()
        self._padding = 0 if rule is None else rule.step
        self.grain = 1 if rule is None else rule.step
        query_width = config.num_heads * config.head_dim
        qkv_width = query_width + 2 * config.num_kv_heads * config.head_dim

        widest = product_rows(most_rows)

        def buffer(width: int, rows: int = widest, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(rows, width, dtype=kind, device=device)

        self._hidden = buffer(config.hidden_size)
        self._qkv = buffer(qkv_width, widest + (0 if rule is None else rule.slack(most_rows)))
        self._inner = buffer(config.intermediate_size)
        half = config.head_dim // 2
        self._rotary = buffer(half, kind=torch.float32), buffer(half, kind=torch.float32)
        self._scratch = Scratch.empty(
            widest, config.hidden_size, config.intermediate_size, (0, 0), device, dtype
        )
        self._attention = PromptAttention(decoder, cache, self._qkv, most_rows, rule, self._split)
        self.refused = self._attention.refused
        self._graphs = PrefillGraphs(device)
        self.uncaptured = ""
        self.paces: tuple[Pace, Pace] | None = None

    def warm(self) -> None:
        """Compiles every kernel that passes will need, by running a few that write to scratch alone."""
        rule, most = self._attention.rule, self.most_rows
        runs = [(0, 1), (1, most)]
        if rule is not None and most >= rule.least_rows:
            # One token more than pieces of a prefix take: the kernel's part is joined to the library's.
            runs += [(rule.least_start(rows) + 1, rows) for rows in (rule.least_rows, most)]
        runs.append((4 * self._split.least_keys, 1))
        self._warm_products()
        for start, rows in runs:
            self.logits(self.forward([self._scratch_chunk(start, rows)])[-1:])

    def capture(self, bounds: GraphBounds | None = None) -> None:
        """Makes graphs of steps within `bounds`, which run instead of the same launches from then on. A graph
        is captured in some 100 ms; they share all their memory with passes that are none."""
        bounds, plans = bounds or GraphBounds(), {}
        most = min(bounds.rows, self.most_rows)
        layouts = []
        for rows in sorted({product_rows(rows) for rows in range(1, most + 1)}, reverse=True):
            plans[rows] = self._attention.graph_plans(rows, self._tuning)
            chunks = bounds.chunks(rows)
            layouts.append(self._attention.graph_layout(rows, chunks, bounds.entries, plans[rows]))
        nowhere: list[Run[int]] = [()] * len(self._attention.heads)
        self._graphs.capture(layouts, lambda layout, there: self._launch(there, plans[layout.rows], nowhere))
        self.uncaptured = self._graphs.failure

    def take_paces(self) -> None:
        """Of a small pass and of the largest, once all is there that they will run by."""
        stream = compute_stream(self._decoder.device)
        self.paces = self._pace(min(_FEW_ROWS, self.most_rows), stream), self._pace(self.most_rows, stream)

    def _scratch_chunk(self, start: int, rows: int) -> Chunk:
        """All of it is written to the block that is nobody's."""
        sequence = Sequence((0,) * (start + rows), start + rows, SamplingParams(), Limits(1))
        sequence.blocks = tuple(
            (0,) * group.blocks_for(sequence.length) for group in self._decoder.layout.groups
        )
        return Chunk(sequence, start, rows)

    def _pace(self, rows: int, stream: ComputeStream) -> Pace:
        """The middle one of a few passes, each said when the one before has ended, as to an idle device."""
        chunk, took = self._scratch_chunk(0, rows), []
        for _ in range(_TRIES):
            with stream.activate():
                begun = stream.record_event()
                self.forward([chunk])
                end = stream.record_event()
            while not end.query():
                time.sleep(_POLL_S)
            took.append(end.seconds_since(begun))
        return Pace(rows, median(took))

    def _warm_products(self) -> None:
        """Each product with each number of rows that passes have, and the head with a few."""
        layer = self._decoder.layers[0]
        for rows in sorted({product_rows(rows) for rows in range(1, self.most_rows + 1)}):
            hidden, attended = self._hidden[:rows], self._attention.attended(rows)
            self._product("qkv", self._qkv[:rows], hidden, layer.qkv)
            self._product("output", hidden, attended, layer.output)
            self._product("gate_up", self._inner[:rows], hidden, layer.gate_up)
            self._product("down", hidden, self._inner[:rows], layer.down)
        for rows in range(1, min(_HEAD_ROWS, self.most_rows) + 1):
            self.logits(self._hidden[:rows])

    def forward(self, chunks: Run[Chunk]) -> Tensor:
        """Writes the chunks' keys and values into their sequences' blocks → [N, hidden] after the final norm,
        rows packed in the chunks' order; a view of a buffer, good until the next pass. ValueError where
        there are more rows than the pass is for."""
        rows = sum(chunk.count for chunk in chunks)
        if not 0 < rows <= self.most_rows:
            raise ValueError(f"a pass of {rows} rows, made for {self.most_rows}")
        runs, attention = [(chunk.start, chunk.count) for chunk in chunks], self._attention
        plans = [attention.plan(runs, heads, self._tuning) for heads in attention.heads]
        step = StepInputs(chunks, product_rows(rows), plans)
        if not self._graphs.replay(step):
            self._run_eagerly(step)
        return self._normed(step.rows)[:rows]

    def _run_eagerly(self, step: StepInputs) -> None:
        """Says the step launch by launch."""
        if any(plan.attention.by_library for plan in step.plans):
            # Its calls read on behind the rows, and a NaN of an earlier pass would spread.
            self._qkv[step.rows : step.rows + self._padding].zero_()
        layout = step.layout
        there = torch.empty(layout.size, dtype=torch.int32, device=self._decoder.device)
        put_ints(step.values(layout), there)
        self._launch(layout.places(there), step.plans, step.lines)

    def _launch(self, there: Places[Tensor], plans: Run[GroupPlan], lines: Run[Run[int]]) -> None:
        """All of a pass, over inputs on the device; a graph is what this launches. Rows without a token are
        padding for the products: zeros, or what layers make of zeros."""
        rows = there.token.shape[0]
        groups = [
            PlannedRows(plan.attention, plan.tuning, places, there.tables, line)
            for plan, places, line in zip(plans, there.groups, lines, strict=True)
        ]
        decoder, eps = self._decoder, self._decoder.config.rms_norm_eps
        hidden, qkv, inner = self._hidden[:rows], self._qkv[:rows], self._inner[:rows]
        rotary = self._rotary[0][:rows], self._rotary[1][:rows]
        self._attention.begin(rows)
        embed(
            hidden, rotary, there.token, there.position,
            decoder.embedding, decoder.rope.frequencies, decoder.rope.scale,
        )  # fmt: skip
        for layer in decoder.layers:
            planned, heads = groups[layer.group], self._attention.heads[layer.group]
            self._product("qkv", qkv, hidden, layer.qkv, Norm(layer.attention_norm, eps))
            prompt_qkv(
                qkv, self._cache.groups[layer.group], layer.index, there.tables, planned.places.line,
                there.position, rotary, heads, _norms(layer),
            )  # fmt: skip
            attended = self._attention.run(layer, rows, planned)
            self._product("output", hidden, attended, layer.output)
            self._product("gate_up", inner, hidden, layer.gate_up, Norm(layer.mlp_norm, eps))
            self._product("down", hidden, inner, layer.down)
        norm_rows(self._normed(rows), hidden, decoder.norm, eps)

    def _normed(self, rows: int) -> Tensor:
        """[rows, hidden]: where a pass leaves what it yields."""
        width = self._hidden.shape[1]
        return self._scratch.normed[: rows * width].view(rows, width)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] of `forward` → [M, vocab] in the model's dtype."""
        return torch.mm(hidden, self._decoder.head.t())

    def _product(self, name: str, out: Tensor, x: Tensor, linear: Linear, norm: Norm | None = None) -> None:
        run_product(out, x, linear, EPILOGUES[name], norm, Library(), self._scratch)


def _norms(layer: Layer) -> tuple[Tensor, Tensor] | None:
    if layer.query_norm is None or layer.key_norm is None:
        return None
    return layer.query_norm, layer.key_norm
