"""A decode step as one list of launches over state that lives on the GPU, for each bucket of rows.

    begin ─ plan ─ layers ─ head ─┬─ fetch (beside the rest) ─────────┐
                                  └─ simple or full sampler ─ finish  ┴ end

What the host posts until the head has ended is fetched, and applied where the next step begins. A read of
host memory takes 4 µs, which the sampler hides. Before a step that nothing runs ahead of, `fetch` is a graph
of its own.

A bucket has two graphs: one for greedy and plain temperature sampling, one with the full sampler
(`graph_sampler`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from baton.device.graphs import Graph, GraphStream
from baton.device.host_memory import HostMemory
from baton.engine.decode.gpu_pass import DecodePass, PassOptions
from baton.engine.decode.graph_sampler import GraphSampler
from baton.engine.decode.slot_state import SlotState
from baton.engine.kernels.gpu.attention.items import TILE
from baton.engine.kernels.gpu.sampling.sample_simple import sample_places, sample_simple
from baton.engine.kernels.gpu.step import step_kernels as kernels
from baton.engine.kernels.gpu.step.plan_items import plan_items
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.modules import Model
from baton.engine.plan.decode_rows import batches_up_to
from baton.engine.plan.decode_state import SIMPLE
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.mailbox import Feature

_EVERYTHING = ~Feature(0)


class _HostArrays:
    """Views of host memory that the kernels read and write: mailbox, ring and the slots' positions."""

    def __init__(self, memory: HostMemory, rings: SharedRings) -> None:
        (tail, entries), (header, words) = rings.mailbox_place, rings.ring_place
        count = rings.mailbox_entries * kernels.RECORD_WORDS.value
        self.mailbox_tail = memory.tensor(tail, 1, torch.int64)
        self.mailbox_words = memory.tensor(entries, count, torch.int32)
        self.mailbox_laps = memory.tensor(entries, count // 2, torch.int64)
        self.header = memory.tensor(header, (words - header) // 8, torch.int64)
        self.words = memory.tensor(words, rings.ring_words, torch.int64)
        self.logprobs = memory.tensor(*rings.records_place, torch.int32)
        self.positions = memory.tensor(*rings.positions_place, torch.int64)


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
    ) -> None:
        device = model.device
        self._shape = state.shape
        rows = self._shape.rows
        self._state = state
        self._queue = queue
        self._capacity = rings.ring_words
        self._top = rings.max_logprobs
        self._mailbox_entries = rings.mailbox_entries
        self.control = torch.zeros(kernels.CONTROL_WORDS, dtype=torch.int64, device=device)
        lines = kernels.CLOCK_LINES.value
        self.clocks = torch.zeros(lines, kernels.CLOCK_WIDTH.value, dtype=torch.int64, device=device)
        self._host = _HostArrays(memory, rings)
        self._inbox = torch.zeros(
            kernels.INBOX_ENTRIES, kernels.RECORD_WORDS.value, dtype=torch.int32, device=device
        )
        self.pass_ = DecodePass(model, cache, state.block_tables, rows, options)
        self._windows = [heads.seen for heads in self.pass_.heads]
        bounds = [(window, self.pass_.most_items(number, 0)) for number, window in enumerate(self._windows)]
        self._item_bounds = torch.tensor(bounds, dtype=torch.int32, device=device)
        self._places = sample_places(rows, model.config.vocab_size, device)
        self._sampler = GraphSampler(state, rows, model.config.vocab_size)
        self._drawn = torch.zeros(rows, dtype=torch.int32, device=device)
        self._place = torch.zeros(rows, dtype=torch.int32, device=device)
        self.fetch: Graph = lambda: None
        """Reads the mailbox; captured by `capture`."""

    def capture(self) -> dict[int, StepGraphs]:
        """Captures `fetch` and the graphs of every bucket. Capturing runs steps, with no slot active."""
        self.fetch = self._queue.capture(self._fetch)
        graphs = {}
        for bucket in reversed(batches_up_to(self._shape.rows)):
            graphs[bucket] = StepGraphs(
                simple=self._queue.capture(lambda b=bucket: self._sample_simple(b)),  # type: ignore[misc]
                samples=self._queue.capture(lambda b=bucket: self._sampling(b)),  # type: ignore[misc]
            )
        return graphs

    def _sample_simple(self, bucket: int) -> None:
        self.draw(bucket, self._front(bucket, SIMPLE))

    def draw(self, bucket: int, logits: Tensor) -> None:
        """Launches the rest of a step whose head has run, with the quicker sampler. logits [bucket, vocab].
        What the host has posted is fetched meanwhile."""
        self._queue.fork(self._fetch)
        inputs = self.pass_.inputs
        sample_simple(
            self._drawn[:bucket], logits, inputs.slot, inputs.position,
            self._state.records, self.control, self.clocks, self._places,
        )  # fmt: skip
        self._finish()
        self._queue.join()

    def _sampling(self, bucket: int) -> None:
        logits = self._front(bucket, _EVERYTHING)
        self._queue.fork(self._fetch)
        inputs = self.pass_.inputs
        self._sampler.launch(
            self._drawn, logits, (inputs.slot, inputs.position, self._place), self.control,
            self.clocks, self._host.logprobs, (self._capacity, self._top),
        )  # fmt: skip
        self._finish()
        self._queue.join()

    def _front(self, bucket: int, features: Feature) -> Tensor:
        self.begin(bucket, features)
        self.plan(bucket)
        return self.pass_.run(bucket)

    def begin(self, bucket: int, features: Feature) -> None:
        """Launches the step's first kernel: it applies the mailbox and lists the rows of up to `bucket`
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
            ROWS_POWER=triton.next_power_of_2(self._shape.rows),
            WORDS=self._shape.words,
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

    def plan(self, bucket: int) -> None:
        """Launches the planning of each cache group's attention items, in a step of up to `bucket` rows."""
        inputs, policy = self.pass_.inputs, self.pass_.policy(bucket)
        for items, window in zip(inputs.items, self._windows, strict=True):
            plan_items[(1,)](
                self.control,
                inputs.slot,
                inputs.position,
                items.count,
                items.items,
                window,
                policy.wanted,
                policy.shortest,
                policy.wave,
                ROWS_POWER=triton.next_power_of_2(self._shape.rows),
                TILE=TILE,
                FIXED=policy.fixed or 0,
                num_warps=4,
            )

    def _finish(self) -> None:
        inputs, state, host = self.pass_.inputs, self._state, self._host
        kernels.finish[(1,)](
            self.control,
            self.clocks,
            host.header,
            host.mailbox_tail,
            host.words,
            host.positions,
            state.active,
            state.records.view(torch.int32),
            inputs.slot,
            inputs.position,
            self._place,
            self._drawn,
            SLOTS=self._shape.slots,
            ROWS_POWER=triton.next_power_of_2(self._shape.rows),
            CAPACITY=self._capacity,
            num_warps=4,
        )
