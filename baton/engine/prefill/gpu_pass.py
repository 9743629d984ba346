"""A prefill step's forward pass by the GPU kernels: chunks of any lengths packed into one run of rows.

The layer program (`forward.layer_program`), with the vendor library's products, and as `attend` the norms and
rotary embedding of q and k, the write to the cache, and `prefill.attention`. The step's inputs go to the
device in one copy, and nothing waits for the device. Steps of few rows are graphs of the same launches
(`prefill.graphs`).

Rows of a decode step may join (`forward.joined_rows`), as in the mixed batches of Sarathi-Serve
(Agrawal et al. 2024). They stand behind those of prompts; products are of both, so that weights are read
once, and each has its own attention. Prompts have padding, so that both make a number of rows that products
have.

Each of several devices has a pass of its own (`prefill.group_pass`), whose step begins and ends with a node
of the exchange; behind each attention and MLP all add up what they have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Run
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from baton.device.streams.cuda_stream import DEFAULT_STREAM, compute_stream, current_stream
from baton.device.streams.graphs import Graph, Recorder
from baton.device.streams.stream import ComputeStream
from baton.device.streams.upload import put_ints
from baton.engine.forward.joined_rows import JoinedRows, row_count
from baton.engine.forward.layer_program import embed_rows, layer_launches
from baton.engine.forward.layers.experts import run_experts
from baton.engine.forward.layers.linear import Gemm
from baton.engine.forward.products.code_products import has_w8a8
from baton.engine.gemm_dispatch.choice import Choice, Library, W8A8Library, W8A8Tuning
from baton.engine.kernels.gpu.attention.prompt_items import PromptTuning
from baton.engine.kernels.gpu.attention.prompt_qkv import prompt_qkv
from baton.engine.kernels.product_rows import product_rows
from baton.engine.kernels.quantized_weight import QuantizedWeight
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.layers.attention import Attention
from baton.engine.model.layers.experts import ExpertsMlp
from baton.engine.model.layers.linear import Product
from baton.engine.model.modules import Model
from baton.engine.parallel.rank_exchange import Launches, RankExchange
from baton.engine.plan.prefill_step import PrefillStep
from baton.engine.prefill.attention import PlannedRows, PromptAttention, prompt_workspace
from baton.engine.prefill.attention_plan import KeySplit, LibraryRule
from baton.engine.prefill.graphs import Case, GraphBounds, PrefillGraphs
from baton.engine.prefill.step_inputs import GroupPlan, Places, StepInputs
from baton.engine.random_tokens import random_tokens
from baton.perf_model.prefill_fit import TimedPass
from baton.perf_model.row_times import RowTimes

# Prompts that end in one step and whose head is warmed up.
_HEAD_ROWS = 8
# Rows of the small timed pass, tries of each pass, and how often its end is looked for.
_FEW_ROWS, _TRIES, _POLL_S = 64, 3, 0.0002


def _choice(product: Product) -> Choice:
    """Many rows are the library's; with weights of 8 bits their codes are multiplied."""
    weight = product.linear.weight
    if not isinstance(weight, QuantizedWeight) or not has_w8a8(weight):
        return Library()
    return W8A8Library() if weight.format.codes == "fp8" else W8A8Tuning()


class PrefillPass:
    """Buffers for up to `most_rows` rows, and the launches that fill them. The attention library's plans are
    built here: a part of a second each, for a few dozen."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        most_rows: int,
        rule: LibraryRule | None,
        tuning: PromptTuning | None = None,
        split: KeySplit | None = None,
        joined: Run[JoinedRows] = (),
        exchange: RankExchange | None = None,
    ) -> None:
        """`rule`: what the library takes of attention; `tuning` None: by the rows; `split`: when
        few rows' keys are shared by several programs; None: as is best for a large GPU. `joined`: the rows
        of another step that may join a pass, one of them at a time; `capture` makes graphs for each.
        `exchange`: with the other ranks of a model that is divided; ValueError where such a model has none,
        or another has one."""
        if (exchange is None) != (model.config.split.count == 1):
            raise ValueError(f"a pass of {model.config.split} with exchange {exchange}")
        self.most_rows = most_rows
        self.device = model.device
        self._joined = joined
        most_joined = max((each.rows for each in joined), default=0)
        self._most_product_rows = product_rows(most_rows + most_joined)
        self._model = model
        self._cache = cache
        self._tuning = tuning
        self._split = split or KeySplit()
        self._padding = 0 if rule is None else rule.step
        self.alignment = 1 if rule is None else rule.step
        self.workspace = prompt_workspace(model, most_rows, rule, self._split, most_joined)
        self._exchange = exchange
        self._gemm = Gemm(model, [self._most_product_rows], lambda product, rows: _choice(product), exchange)
        # Rows are normed by the pass itself; logits are taken of some of them.
        self._head = replace(model.head, norm=None)
        if exchange is not None:
            most, hidden = exchange.logits.shape[0], self.workspace.hidden
            self._asked = hidden.new_zeros(most, hidden.shape[1])
            self._own_logits = hidden.new_zeros(most, self._head.outputs)
        dequantized = [
            weight.shape[0] * weight.shape[1]
            for weight in (kind.linear.weight for kind in model.product_kinds())
            if isinstance(weight, QuantizedWeight) and not has_w8a8(weight)
        ]
        # Elements of the largest weight that a product of many rows dequantises.
        self._most_dequantized = max(dequantized, default=0)
        self.attention = PromptAttention(
            model, cache, self.workspace, most_rows, rule, self._split, most_joined
        )
        self.refused = self.attention.refused
        self.graphs = PrefillGraphs(model.device)
        # Streams on which the vendor's library has computed.
        self._known_streams = {DEFAULT_STREAM}
        self.uncaptured = ""
        self.graph_rows = 0
        self.timed_passes: tuple[TimedPass, TimedPass] | None = None
        self.row_times = RowTimes()

    def warm(self) -> None:
        """Compiles every kernel that passes will need, by running a few that write to scratch alone."""
        rule, most = self.attention.rule, self.most_rows
        runs = [(0, 1), (1, most)]
        if rule is not None and most >= rule.least_rows:
            # One token more than pieces of a prefix take: the kernel's part is joined to the library's.
            runs += [(rule.least_start(rows) + 1, rows) for rows in (rule.least_rows, most)]
        runs.append((4 * self._split.least_keys, 1))
        self._warm_products()
        for start, rows in runs:
            self.logits(self.forward(self._step_on_scratch(start, rows))[-1:])

    def capture(self, bounds: GraphBounds | None = None) -> None:
        """Makes graphs of steps within `bounds`, which run instead of the same launches from then on. A graph
        is captured in some 100 ms; they share all their memory with passes that are none."""
        bounds, cases = bounds or GraphBounds(), []
        plans: dict[int, list[GroupPlan]] = {}
        for joined in (None, *self._joined):
            counts = range(1, min(bounds.rows - row_count(joined), self.most_rows) + 1)
            for rows in sorted({self._prompt_rows(count, joined) for count in counts}, reverse=True):
                plans[rows] = self.attention.graph_plans(rows, self._tuning)
                chunks = bounds.chunks(rows)
                layout = self.attention.graph_layout(rows, chunks, bounds.entries, plans[rows])
                cases.append((layout, joined))
        nowhere: list[Run[int]] = [()] * len(self.attention.heads)

        def launch(case: Case, there: Places[Tensor]) -> None:
            layout, joined = case
            _make_all(self._launches(there, plans[layout.rows], nowhere, joined))

        self.uncaptured = self.graphs.capture(cases, launch)
        self.graph_rows = bounds.rows if self.graphs.sizes else 0

    def measure_products(self) -> None:
        """Times products with each number of rows, of which passes and graphs then have those that are worth
        it; to be called between `warm` and `capture`.

        The best of a few tries of a layer's products with each number of rows that passes have. Each is a
        graph: products of few rows take the host longer to launch one by one than the device to run. A
        capture waits until the device is idle, so no other stream's kernels slow down what is timed. Nothing
        is measured where the device has no memory for graphs. Experts are those that the rows of the last
        warm-up pass take."""
        if self.workspace.experts is not None:
            self.workspace.experts.present.zero_()  # each row of all sizes holds a token
        stream, recorder, ends = compute_stream(self.device), Recorder(self.device), []
        for rows in self._all_product_rows():
            try:
                run = recorder.capture(partial(self._run_products, rows))
            except RuntimeError:
                return
            with stream.activate():
                events = [stream.record_event()]
                for _ in range(_TRIES):
                    run()
                    events.append(stream.record_event())
            ends.append((rows, events))
        while not ends[-1][1][-1].query():
            time.sleep(_POLL_S)
        self.row_times = RowTimes.of(
            {rows: min(b.seconds_since(a) for a, b in pairwise(events)) for rows, events in ends}
        )

    def measure_step_times(self) -> None:
        """Times a small pass and the largest; to be called after `warm` and `capture`."""
        stream, (few, most) = compute_stream(self.device), self.steps_to_time()
        self.timed_passes = time_pass(self.forward, few, stream), time_pass(self.forward, most, stream)

    def steps_to_time(self) -> tuple[PrefillStep, PrefillStep]:
        """A step of few rows, and one of the most."""
        few = min(_FEW_ROWS, self.most_rows)
        return self._step_on_scratch(0, few), self._step_on_scratch(0, self.most_rows)

    def _step_on_scratch(self, start: int, rows: int) -> PrefillStep:
        tokens = random_tokens(self._model.config.vocab_size, rows)
        return PrefillStep.on_scratch(self._model.layout, start, tokens)

    def _all_product_rows(self) -> list[int]:
        return sorted({product_rows(rows) for rows in range(1, self._most_product_rows + 1)})

    def _run_products(self, rows: int) -> None:
        *of_layers, _ = self._model.product_kinds()
        for product in of_layers:
            self._gemm(product, *self.workspace.operands(product.name, rows))
        mixture = next((each.mlp for each in self._model.layers if isinstance(each.mlp, ExpertsMlp)), None)
        if mixture is not None and self.workspace.experts is not None:
            run_experts(self.workspace.experts, mixture, self.workspace.hidden[:rows])

    def _warm_products(self) -> None:
        """Runs each product with each number of rows that passes have, and the head with a few."""
        for rows in self._all_product_rows():
            self._run_products(rows)
        for rows in range(1, min(_HEAD_ROWS, self.most_rows) + 1):
            self.logits(self.workspace.hidden[:rows])

    def forward(self, step: PrefillStep, joined: JoinedRows | None = None) -> Tensor:
        """Writes keys and values into the chunks' blocks → [N, hidden] after the final norm, rows packed in
        the chunks' order; a view of a buffer, valid until the next pass. `joined`: one of those that the pass
        is made for, which it runs as well. Raises ValueError where the step has more rows than the pass is
        made for."""
        _make_all(self.prepare(step, joined))
        return self.result(step.rows)

    def result(self, rows: int) -> Tensor:
        """[rows, hidden]: what `forward` returns, of the last pass, whose prompts had `rows` rows."""
        return self._normed(rows)

    def prepare(self, step: PrefillStep, joined: JoinedRows | None = None) -> Launches:
        """Copies a step's inputs to the device → its launches, which need no memory that is not there
        already. Raises what `forward` does."""
        if not 0 < step.rows <= self.most_rows:
            raise ValueError(f"a pass of {step.rows} rows, made for {self.most_rows}")
        self._begin_stream()
        attention, rows = self.attention, self._prompt_rows(step.rows, joined)
        plans = [
            attention.plan(step.runs, heads, self._tuning or attention.tuning(heads, rows))
            for heads in attention.heads
        ]
        inputs = StepInputs(step, rows, plans)
        graph = self.graphs.prepare(inputs, joined)
        return self._prepare_eagerly(inputs, joined) if graph is None else _replay(graph)

    def _prepare_eagerly(self, step: StepInputs, joined: JoinedRows | None) -> Launches:
        """`prepare` of a step without a graph."""
        if any(plan.attention.by_library for plan in step.plans):
            # The library reads behind the rows, and a NaN of an earlier pass would spread.
            rows = step.rows + row_count(joined)
            self.workspace.qkv[rows : rows + self._padding].zero_()
        layout = step.layout
        there = torch.empty(layout.size, dtype=torch.int32, device=self.device)
        put_ints(step.values(layout), there)
        self._reserve()
        return self._launches(layout.places(there), step.plans, step.lines, joined)

    def _begin_stream(self) -> None:
        """Computes products on the current stream, of one of several devices, where none has been. The
        vendor's library has memory of its own for each stream, which torch allocates at the first product:
        among the launches of a step another device would wait meanwhile."""
        stream = current_stream(self.device)
        if self._exchange is None or stream in self._known_streams:
            return
        self._known_streams.add(stream)
        self._run_products(product_rows(1))
        self.logits(self.workspace.hidden[:1])

    def _reserve(self) -> None:
        """Makes torch have memory for what launches of one of several devices dequantise, which then allocate
        none of the device's."""
        if self._exchange is not None:
            self.workspace.hidden.new_empty(self._most_dequantized)

    def _launches(
        self, there: Places[Tensor], plans: Run[GroupPlan], lines: Run[Run[int]], joined: JoinedRows | None
    ) -> Launches:
        """All of a pass, over inputs on the device; a graph is what this launches. Rows without a token are
        padding for the products: zeros, or what layers make of zeros. Rows that join begin and end the
        exchange's step, which sends them and gathers their logits."""
        rows = there.token.shape[0]
        groups = [
            PlannedRows(plan, places, there.tables, line)
            for plan, places, line in zip(plans, there.groups, lines, strict=True)
        ]
        model, workspace = self._model, self.workspace
        behind, total = workspace.behind(rows), rows + row_count(joined)
        self.attention.begin(total)
        embed_rows(model, workspace, rows, there.token, there.position)
        if workspace.experts is not None:
            workspace.experts.present[:rows].copy_(there.token)
        if joined is not None:
            joined.begin(behind)
        elif self._exchange is not None:
            self._exchange.begin(None)

        def attend(attention: Attention) -> Tensor:
            number, cache = attention.group, self._cache
            planned, heads = groups[number], self.attention.heads[number]
            prompt_qkv(
                workspace.qkv[:rows], cache.groups[number], attention.index, there.tables,
                planned.places.line, there.position, workspace.rotary(rows, attention.rope), heads,
                attention.head_norms, cache.scales[number],
            )  # fmt: skip
            found = self.attention.run(attention, rows, planned)
            if joined is None:
                return found
            out = workspace.attn_out[:total]
            if found.data_ptr() != out.data_ptr():  # the library has memory of its own
                out[:rows].copy_(found)
            joined.attend(attention, behind)
            return out

        yield from layer_launches(model, workspace, total, attend, self._gemm)
        self._gemm.norm(workspace.hidden[:rows], model.norm)
        if joined is not None:
            joined.end(behind)
        elif self._exchange is not None:
            self._exchange.end(self._own_logits[:0], 0)

    def _prompt_rows(self, rows: int, joined: JoinedRows | None) -> int:
        """Rows that a pass of `rows` rows of prompts has for them, with padding."""
        more = row_count(joined)
        return self.row_times.padded(product_rows(rows + more)) - more

    def _normed(self, rows: int) -> Tensor:
        """[rows, hidden]: the buffer of a pass's result."""
        width = self.workspace.hidden.shape[1]
        return self._gemm.scratch.normed[: rows * width].view(rows, width)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] of `forward` → [M, vocab] in the model's dtype; of a model that is divided, this
        rank's part of the vocabulary."""
        logits = hidden.new_empty(hidden.shape[0], self._head.outputs)
        self._gemm(self._head, logits, hidden)
        return logits

    def ask(self, hidden: Tensor) -> None:
        """Enqueues the copy of rows [M, hidden] of the first rank's `forward`, the same on all ranks, whose
        logits `gather_logits` is to compute."""
        self._asked[: len(hidden)].copy_(hidden, non_blocking=True)
        self._reserve()

    def gather_logits(self, rows: int) -> None:
        """Launches a step of the exchange in which all ranks store their logits of the first `rows` rows that
        were asked for into the exchange's, in the first one's memory."""
        if self._exchange is None:
            raise ValueError("one device has all logits")
        self._exchange.begin(None)
        part = self._own_logits[:rows]
        self._gemm(self._head, part, self._asked[:rows])
        self._exchange.end(part, self._model.config.head_rows.start)


def time_pass(
    forward: Callable[[PrefillStep], object], step: PrefillStep, stream: ComputeStream
) -> TimedPass:
    """The shortest of a few passes behind another one: launched on an idle device, a pass would take the
    host's time before its first kernel as well, which in a worker that is busy passes beside a step. A slow
    host makes passes longer, and none shorter than they take the device."""
    with stream.activate():
        ends = []
        for _ in range(1 + _TRIES):
            forward(step)
            ends.append(stream.record_event())
    while not ends[-1].query():
        time.sleep(_POLL_S)
    took = [end.seconds_since(begun) for begun, end in pairwise(ends)]
    return TimedPass(step.rows, min(took))


def _replay(graph: Graph) -> Launches:
    graph()
    yield


def _make_all(launches: Launches) -> None:
    for _ in launches:
        pass
