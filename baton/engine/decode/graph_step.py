"""A decode step as one list of launches over state that lives on the GPU, for each bucket of rows.

    begin ─ plan ─ layers ─ head ─┬─ fetch (beside the rest) ─────────┐
                                  └─ simple or full sampler ─ finish  ┴ end

A step with drafts has rows beyond one a slot, and three parts more (`DraftRows`):

    begin ─ propose, rows for drafts ─ plan ─ layers ─ head ─ draw ─ accept ─ append ─ finish

Entries that the host posts until the head has ended are fetched, and applied where the next step begins. A
read of host memory takes 4 µs, which the sampler hides. Before a step that nothing runs ahead of, `fetch` is
a graph of its own.

A bucket has two graphs: one for greedy and plain temperature sampling, one with the full sampler
(`graph_sampler`). Kernels for drafts are launched only where slots may have several rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from baton.device.host_memory import HostMemory
from baton.device.streams.graphs import Graph, GraphStream
from baton.engine.decode.attention_plan import plan_attention, step_lanes
from baton.engine.decode.draft_rows import DraftRows, Propose
from baton.engine.decode.gpu_pass import DecodePass, PassOptions
from baton.engine.decode.graph_sampler import GraphSampler
from baton.engine.decode.slot_state import SlotState
from baton.engine.decode.step_rows import StepRows
from baton.engine.kernels.gpu.attention.items import TILE
from baton.engine.kernels.gpu.sampling.sample_simple import sample_places, sample_simple
from baton.engine.kernels.gpu.step import step_kernels as kernels
from baton.engine.kernels.gpu.step.finish import LINE_WORDS, finish
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.modules import Model
from baton.engine.parallel.rank_exchange import RankExchange
from baton.engine.plan.decode_rows import batches_of, batches_up_to
from baton.engine.plan.decode_state import SIMPLE
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.mailbox import Feature

_EVERYTHING = ~Feature(0)


class _HostArrays:
    """Views of host memory that the kernels read and write: mailbox, ring and the slots' progress."""

    def __init__(self, memory: HostMemory, rings: SharedRings) -> None:
        (tail, entries), (header, words) = rings.mailbox_place, rings.ring_place
        count = rings.mailbox_entries * kernels.RECORD_WORDS.value
        self.mailbox_tail = memory.tensor(tail, 1, torch.int64)
        self.mailbox_words = memory.tensor(entries, count, torch.int32)
        self.mailbox_laps = memory.tensor(entries, count // 2, torch.int64)
        self.header = memory.tensor(header, (words - header) // 8, torch.int64)
        self.words = memory.tensor(words, rings.ring_words, torch.int64)
        self.logprobs = memory.tensor(*rings.records_place, torch.int32)
        self.progress = memory.tensor(*rings.progress_place, torch.int64)


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """The graphs of one bucket, each a whole step: `simple` for slots with no features but SIMPLE,
    `samples` for any."""

    simple: Graph
    samples: Graph


class GraphStep:
    """Owns the step's state on the GPU and captures its graphs; largest bucket first, in one memory pool."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        state: SlotState,
        rings: SharedRings,
        memory: HostMemory,
        queue: GraphStream,
        options: PassOptions,
        propose: Propose | None = None,
        exchange: RankExchange | None = None,
    ) -> None:
        """`propose`: see `DraftRows`; None: nothing proposes drafts. `exchange`: with the other ranks of a
        model that is divided."""
        device = model.device
        self._shape = state.shape
        rows = self._shape.rows
        self._state = state
        self._queue = queue
        self._capacity = rings.ring_words
        self._top = rings.max_logprobs
        self._mailbox_entries = rings.mailbox_entries
        self._exchange = exchange
        self._rows = StepRows.empty(rows, device)
        self.control = self._rows.control
        self._row_count = self._rows.count
        lines = kernels.CLOCK_LINES.value
        self.clocks = torch.zeros(lines, kernels.CLOCK_WIDTH.value, dtype=torch.int64, device=device)
        self._host = _HostArrays(memory, rings)
        self._inbox = torch.zeros(
            kernels.INBOX_ENTRIES, kernels.RECORD_WORDS.value, dtype=torch.int32, device=device
        )
        batches = batches_of(self._shape)
        self.pass_ = DecodePass(
            model, cache, state.block_tables, rows, options, batches, self._shape.rows_per_slot,
            self._row_count, self._rows, exchange,
        )  # fmt: skip
        self._windows = [heads.seen for heads in self.pass_.heads]
        bounds = [(window, self.pass_.most_items(number, 0)) for number, window in enumerate(self._windows)]
        self._item_bounds = torch.tensor(bounds, dtype=torch.int32, device=device)
        self._places = sample_places(rows, model.config.vocab_size, device)
        self._sampler = GraphSampler(state, rows, model.config.vocab_size)
        self._drawn = torch.zeros(rows, dtype=torch.int32, device=device)
        self._place = torch.zeros(rows, dtype=torch.int32, device=device)
        # The slots' lines of progress, from which a step goes on counting.
        shape = self._shape.slots, LINE_WORDS.value
        self._counted = torch.zeros(shape, dtype=torch.int64, device=device)
        self._drafts: DraftRows | None = None
        if self._shape.rows_per_slot > 1:
            inputs = self.pass_.inputs
            self._drafts = DraftRows(
                state, (inputs.slot, inputs.token, inputs.position, self._place), self._drawn, self.control,
                self._item_bounds, self._capacity, propose,
            )  # fmt: skip
        self.fetch: Graph = lambda: None
        """Reads the mailbox; captured by `capture`."""

    def capture(self) -> dict[int, StepGraphs]:
        """Captures `fetch` and the graphs of every bucket. Capturing runs steps, with no slot active."""
        self.fetch = self._queue.capture(self._fetch)
        return {
            bucket: self._graphs(bucket, drafts=False)
            for bucket in reversed(batches_up_to(self._shape.slots))
        }

    def capture_drafts(self, batches: Sequence[int]) -> dict[int, StepGraphs]:
        """Captures the graphs of steps with drafts, of these numbers of rows."""
        return {bucket: self._graphs(bucket, drafts=True) for bucket in reversed(batches)}

    def _graphs(self, bucket: int, *, drafts: bool) -> StepGraphs:
        return StepGraphs(
            simple=self._queue.capture(lambda: self._sample_simple(bucket, drafts)),
            samples=self._queue.capture(lambda: self._sampling(bucket, drafts)),
        )

    def _sample_simple(self, bucket: int, drafts: bool) -> None:
        self.draw(bucket, self._front(bucket, SIMPLE, drafts), drafts=drafts)

    def draw(self, bucket: int, logits: Tensor, *, drafts: bool = False) -> None:
        """Launches the rest of a step whose head has run, with the quicker sampler. logits [bucket, vocab].
        What the host has posted is fetched meanwhile."""
        self._queue.fork(self._fetch)
        inputs = self.pass_.inputs
        sample_simple(
            self._drawn[:bucket], logits, inputs.slot, inputs.position,
            self._state.records, self.control, self.clocks, self._places,
        )  # fmt: skip
        if drafts:
            self.draft_rows.accept()
        self._end(bucket, counts=False, drafts=drafts)

    def _sampling(self, bucket: int, drafts: bool) -> None:
        logits = self._front(bucket, _EVERYTHING, drafts)
        self._queue.fork(self._fetch)
        slot, position, place = self.pass_.inputs.slot, self.pass_.inputs.position, self._place
        self._sampler.draw(
            self._drawn, logits, (slot, position, place), self.control, self.clocks,
            self.draft_rows.tokens if drafts else None,
        )  # fmt: skip
        if drafts:
            self.draft_rows.accept()
        ring = self._capacity, self._top
        self._sampler.report(self._drawn, logits, (slot, place), self.control, self._host.logprobs, ring)
        self._end(bucket, counts=True, drafts=drafts)

    def _end(self, bucket: int, *, counts: bool, drafts: bool) -> None:
        """Launches what follows the draw. `counts`: requests may have penalties."""
        if self._drafts is not None:
            self._drafts.append()
        self._finish(bucket, counts, drafts)
        self._queue.join()

    @property
    def draft_rows(self) -> DraftRows:
        if self._drafts is None:
            raise ValueError("slots have one row each")
        return self._drafts

    def _front(self, bucket: int, features: Feature, drafts: bool) -> Tensor:
        self.begin(bucket, features)
        if drafts:
            self.draft_rows.add(bucket, self.pass_.policy(bucket).fixed)
        self.send_rows()
        self.plan(bucket, self.draft_rows.depth if drafts else None)
        logits = self.pass_.run(bucket, self._row_count if drafts else None)
        self.keep_if_whole()
        return logits

    def send_rows(self) -> None:
        """Launches the first node of the exchange, which sends the step's rows to the other devices; nothing
        where there are none."""
        if self._exchange is not None:
            self._exchange.begin(self._rows.sent)

    def keep_if_whole(self) -> None:
        """Launches, behind the head, what takes all rows from the step where the exchange has failed: nothing
        is drawn from such logits, and no slot advances."""
        if self._exchange is not None:
            self._row_count.mul_(self._exchange.whole)

    def attend_alone(self, bucket: int, *, drafts: bool) -> None:
        """Launches the plan and the attention of a step, of the rows that `set_rows` has written."""
        self.plan(bucket, self.draft_rows.depth if drafts else None)
        self.pass_.attend_all(bucket, self._row_count if drafts else None)

    def set_rows(self, slot: Tensor, position: Tensor, depth: Tensor) -> None:
        """Writes the first rows of a step, [R] each, where no `begin` does so."""
        count = len(slot)
        for array, values in (
            (self.pass_.inputs.slot, slot),
            (self.pass_.inputs.position, position),
            (self.draft_rows.depth, depth),
        ):
            array.zero_()
            array[:count].copy_(values.int())
        self._row_count.fill_(count)

    def begin(self, bucket: int, features: Feature) -> None:
        """Launches the step's first kernel: it applies the mailbox and lists a row for each of up to `bucket`
        slots."""
        inputs, state = self.pass_.inputs, self._state
        kernels.begin[(1,)](
            self.control,
            self.clocks,
            self._inbox,
            self._host.words,
            state.active,
            state.records.view(torch.int32),
            self._host.logprobs,
            state.sampler.last_records,
            inputs.slot,
            inputs.token,
            inputs.position,
            self._place,
            self._item_bounds,
            bucket,
            int(features),
            SLOTS=self._shape.slots,
            ROWS_POWER=step_lanes(self._shape, bucket),
            WORDS=self._shape.least_words,
            CAPACITY=self._capacity,
            TOP=self._top,
            RECORD_POWER=triton.next_power_of_2(2 + 2 * self._top),
            GROUPS=len(self._windows),
            TILE=TILE,
            FIXED=self.pass_.policy(bucket).fixed or 0,
            num_warps=4,
        )

    def _fetch(self) -> None:
        kernels.fetch[(1,)](
            self.control,
            self._host.header,
            self._host.mailbox_words,
            self._host.mailbox_laps,
            self._inbox,
            ENTRIES=kernels.INBOX_ENTRIES,
            CAPACITY=self._mailbox_entries,
            num_warps=4,
        )

    def plan(self, bucket: int, depth: Tensor | None = None) -> None:
        """Launches the planning of each cache group's attention items, in a step of up to `bucket` rows;
        `depth` of each, where a slot may have several."""
        plan_attention(self.pass_, self.control, self._shape, bucket, depth)

    def _finish(self, bucket: int, counts: bool, drafts: bool) -> None:
        inputs, state, host = self.pass_.inputs, self._state, self._host
        in_output = state.sampler.counts.in_output
        of_drafts = self.draft_rows.progress if drafts else (inputs.slot,) * 3
        finish[(1,)](
            self.control,
            self.clocks,
            host.header,
            host.mailbox_tail,
            host.words,
            host.progress,
            self._counted,
            state.active,
            state.records.view(torch.int32),
            in_output,
            inputs.slot,
            inputs.position,
            self._place,
            self._drawn,
            *of_drafts,
            SLOTS=self._shape.slots,
            ROWS_POWER=step_lanes(self._shape, bucket),
            CAPACITY=self._capacity,
            VOCAB=in_output.shape[1],
            COUNTS=counts,
            DRAFTS=drafts,
            num_warps=4,
        )
