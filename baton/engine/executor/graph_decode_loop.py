"""The decode loop of a GPU: it enqueues replays of the step's CUDA graph ahead; tokens go from the GPU to the
output ring without passing the host.

After each step the GPU writes a status word to the ring's counters, which `observe` reads. From that and from
the entries posted since, `decode_rows` selects the batch and the sampler of the next step. While every active
slot is held nothing is replayed, until an entry is posted or a mask has been written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from baton.device.host_memory import HostMemory
from baton.device.streams.cuda_stream import StreamGroup, TorchStream
from baton.device.streams.graphs import Graph, GraphStream
from baton.device.streams.stream import ComputeStream, Event
from baton.engine.decode.draft_rows import Propose, lookup_in
from baton.engine.decode.follower_step import FollowerStep
from baton.engine.decode.gpu_pass import PassOptions
from baton.engine.decode.graph_step import GraphStep, StepGraphs
from baton.engine.decode.joined_rows import JoinedDecodeRows
from baton.engine.decode.lookahead_fill import LookaheadFill
from baton.engine.decode.occupied_slots import OccupiedSlots, sizes_to_measure
from baton.engine.decode.slot_state import SlotState
from baton.engine.device_watchdog import DeviceWatchdog
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.kernels.gpu.step import step_kernels as kernels
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.modules import Model
from baton.engine.parallel.rank_exchange import DeviceGroup
from baton.engine.plan.decode_rows import draft_batches_up_to, mixed_batches_up_to
from baton.engine.plan.step_plan import DecodeRows
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.mask_board import SlotMask
from baton.engine.speculation.lookahead_table import Output
from baton.engine.speculation.size_times import StepSize
from baton.perf_model.curve import Curve
from baton.perf_model.step_costs import StepCosts

# Part of the typical step time before and after its end in which most steps end; the poll interval in there.
_END_SPREAD, _NEAR_END_S = 1 / 8, 0.0001
# Steps in a row by which a bucket is timed, beside one more, and how often that is tried.
_TIMED, _TRIES = 4, 2
# Far more than a device's caches hold.
_COPIED_BYTES = 1 << 29
_COUNT_MASK = kernels.STATUS_COUNT_MASK.value
_ACTIVE_MASK = (1 << kernels.STATUS_FEATURES.value) - 1
_FEATURES_MASK = (1 << (kernels.STATUS_APPLIED.value - kernels.STATUS_FEATURES.value)) - 1


class GraphDecodeLoop(DecodeLoop):
    """A step is a replay, which `launch` enqueues; its tokens appear in the ring when it has run."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        state: SlotState,
        rings: SharedRings,
        memory: HostMemory,
        options: PassOptions,
        clock: Callable[[], float] = time.monotonic,
        *,
        mixes: bool = False,
        propose: Propose | None = None,
        adaptive: bool = False,
        followers: Sequence[tuple[Model, KVCache]] = (),
        group: DeviceGroup | None = None,
    ) -> None:
        """`mixes`: whether steps may be part of prefill steps. `propose`: see `DraftRows`; None: drafts are
        looked up in the state's history, where it has one, and in its lookahead table. `adaptive`: see
        `DecodeLoop`. `followers`: model and cache on each of the worker's other devices, by rank, which
        exchange through `group`. ValueError where drafts come with followers."""
        propose = propose or lookup_in(state)
        self._fill: LookaheadFill | None = None
        if state.lookahead is not None and state.history is not None:
            self._fill = LookaheadFill(state.lookahead, state.history)
        self.queue = GraphStream(model.device)
        first, *others = [None] if group is None else group.ranks
        self.step_state = GraphStep(model, cache, state, rings, memory, self.queue, options, propose, first)
        self.group = group
        """The exchange among the worker's devices; None where there is one device."""
        self.followers = [
            FollowerStep(other, own, state.tables_on(other.device), state.shape, options, exchange)
            for (other, own), exchange in zip(followers, filter(None, others), strict=True)
        ]
        batches = mixed_batches_up_to(state.shape.slots) if mixes else []
        mixed = [JoinedDecodeRows(self.step_state, batch, self.followers) for batch in batches]
        shared = memory.memory
        draft_batches = [] if propose is None else draft_batches_up_to(state.shape)
        super().__init__(
            state, rings.mailbox(shared), rings.writer(shared), rings.progress(shared), mixed, draft_batches,
            adaptive=adaptive,
        )  # fmt: skip
        self._clock = clock
        self._memory = memory  # registered while the graphs live
        # By the rows of a batch: steps without drafts, and steps with some.
        with self.solo():
            self._first_graphs = self.step_state.capture()
            self.graphs = self._on_all_devices(self._first_graphs)
            self.draft_graphs = self.step_state.capture_drafts(draft_batches)
            self.queue.drain()
        if self.queue.on_chip:
            with self.step_state.pass_.all_rows_present():
                # A step of the largest bucket with no slot active, so that an expected duration is known
                # from the start.
                self.times.add(self._run(self.graphs[self.shape.slots].samples, 1), steps=0)
                self.measured_costs = self.measure_costs(cache)
            if group is not None:
                group.check()  # steps of a start in which a device waited in vain took the deadline
        self._tail_when_full = -1
        # Whether a mask was written that no replay enqueued since is sure to see.
        self._mask_written = False
        self._watchdog = DeviceWatchdog(clock)
        if group is not None:
            self._watchdog = DeviceWatchdog(clock, deadline_s=group.deadline_s, check=group.check)
        self._began_at = clock()  # when the replay that runs could begin, at the earliest
        self.steps.typical_s = self.times.typical_s
        self.queue.drain()
        self.observe()

    def _on_all_devices(self, graphs: dict[int, StepGraphs]) -> dict[int, StepGraphs]:
        """The first device's graphs with those of its followers; captures these."""
        if (group := self.group) is None:
            return graphs
        followers = [follower.capture(list(graphs)) for follower in self.followers]

        def on_all(batch: int, first: Graph) -> Graph:
            steps = [first, *(graphs[batch] for graphs in followers)]
            return lambda: group.launch(steps)

        return {
            batch: StepGraphs(on_all(batch, mine.simple), on_all(batch, mine.samples))
            for batch, mine in graphs.items()
        }

    def measure_costs(self, cache: KVCache) -> StepCosts:
        """Measures what steps cost by their sequences and contexts, before there is any."""
        by_rows = self.bucket_seconds()
        if self.draft_graphs:
            with_drafts = {rows: self.seconds_of(graph.simple) for rows, graph in self.draft_graphs.items()}
            if self.steps.policy is not None:
                self.size_times.measured(self._sized_seconds(cache, by_rows, with_drafts))
            by_rows |= {rows: each for rows, each in with_drafts.items() if rows > self.shape.slots}
        return StepCosts.of_batches(list(by_rows), list(by_rows.values()), self._measure_reading(cache))

    def bucket_seconds(self) -> dict[int, float]:
        """Runs steps of each bucket with no slot active, over random tokens → seconds by rows: of all that is
        computed but attention, whose time is that of reading KV. Rows take experts only within
        `DecodePass.all_rows_present`. The best of a few tries, since a single one that is
        disturbed would make all larger buckets look as slow."""
        return {rows: self.seconds_of(self.graphs[rows].simple) for rows in sorted(self.graphs)}

    def alone_seconds(self) -> dict[int, float]:
        """Runs what `bucket_seconds` does on the first device alone, of several: what is left of a step
        without waits for others and loads of their parts. Nothing else may run."""
        with self.solo():
            return {
                rows: self.seconds_of(self._first_graphs[rows].simple) for rows in sorted(self._first_graphs)
            }

    def solo(self) -> AbstractContextManager[None]:
        """Lets every device of several run alone within the context: see `DeviceGroup.solo`."""
        return nullcontext() if self.group is None else self.group.solo()

    def _sized_seconds(
        self, cache: KVCache, plain: dict[int, float], with_drafts: dict[int, float]
    ) -> dict[StepSize, float]:
        """Seconds of steps by rows and sequences, from those of steps without sequences: attention is added,
        whose time depends on both. Plain steps of numbers of rows that no step with drafts has are taken to
        have attention in between."""
        slots = OccupiedSlots(self.step_state, self.state, cache, self.queue)
        attention = {
            rows: self._attention_seconds(slots, rows, [rows], drafts=False)[rows]
            for rows in plain
            if rows in with_drafts or rows in (1, self.shape.slots)
        }
        curve = Curve(tuple(attention), tuple(attention.values()))
        seconds = {StepSize(rows, rows, False): each + curve.value(rows) for rows, each in plain.items()}
        for rows, each in with_drafts.items():
            sizes = sizes_to_measure(rows, self.shape)
            for sequences, more in self._attention_seconds(slots, rows, sizes, drafts=True).items():
                seconds[StepSize(rows, sequences, True)] = each + more
        slots.clear()
        return seconds

    def _attention_seconds(
        self, slots: OccupiedSlots, rows: int, sequences: list[int], *, drafts: bool
    ) -> dict[int, float]:
        """Seconds of all layers' attention by sequences, beyond those of a step without any."""
        slots.occupy(rows, 0)  # a capture launches it with the rows that there are
        graph, seconds = slots.attention(rows, drafts=drafts), dict[int, float]()
        for count in (0, *sequences):
            slots.occupy(rows, count)
            seconds[count] = self.seconds_of(graph)
        return {count: max(seconds[count] - seconds[0], 0.0) for count in sequences}

    def _measure_reading(self, cache: KVCache) -> float:
        """Seconds to read a token's KV, by a copy of zeros within the cache, which holds nothing yet. Layers
        with a sliding window do not count: what they read does not grow."""
        full = [number for number, group in enumerate(cache.layout.groups) if group.window is None]
        if not full:
            return 0.0
        memory = cache.storage[full[0]].view(-1)
        count = min(memory.numel() // 2, _COPIED_BYTES)

        def copy() -> None:
            memory[:count].copy_(memory[count : 2 * count])

        graph = self.queue.capture(copy)
        byte_s = self.seconds_of(graph) / (2 * count)  # read and written
        groups = [cache.layout.groups[number] for number in full]
        return byte_s * sum(group.block_bytes / group.block_tokens for group in groups)

    def seconds_of(self, step: Graph) -> float:
        """Seconds of one of several steps in a row, without what it takes the host to begin: the best of a
        few tries."""
        one, several = (min(self._run(step, count) for _ in range(_TRIES)) for count in (1, 1 + _TIMED))
        return max(several - one, 0.0) / _TIMED

    def _run(self, step: Graph, count: int) -> float:
        """Runs `count` steps on an idle device → seconds until the last one has ended."""
        began = self._clock()
        for _ in range(count):
            step()
        self.queue.drain()
        return self._clock() - began

    @property
    def stream(self) -> ComputeStream | None:
        # On each device in turn with that one's decode steps, so that all have them in the same order.
        queues = [self.queue, *(follower.queue for follower in self.followers)]
        streams = [queue.stream for queue in queues if queue.stream is not None]
        if not streams:
            return None
        first, *others = (TorchStream(steps.device, steps) for steps in streams)
        return StreamGroup(first, others) if others else first

    def write_masks(self, masks: Sequence[SlotMask]) -> None:
        super().write_masks(masks)
        self._mask_written = True

    @property
    def tokens_decoded(self) -> int:
        return int(self.ring.device_counters[1])

    @property
    def nap_s(self) -> float:
        # A quarter of a step, so that short steps do not leave the device idle until the host polls; shorter
        # around the expected end of the one that runs, which tokens and admissions wait for.
        longest, typical = super().nap_s, self.times.typical_s
        if not typical:
            return longest
        longest, spread = min(longest, typical / 4), typical * _END_SPREAD
        left = self._began_at + typical - self._clock()
        return longest if left < -spread else min(longest, max(left - spread, _NEAR_END_S))

    def _learn(self, output: Output) -> None:
        assert self._fill is not None
        self._fill.learn(output)

    def take_reading(self, slot: int) -> Event | None:
        return None if self._fill is None else self._fill.take_reading(slot)

    def device_hung(self) -> bool:
        # Raises ExchangeTimeoutError where a device waited for another in vain.
        self.observe()
        steps = self.steps
        return self._watchdog.look(
            pending=steps.queued > 0, progress=steps.ended, expected_step_s=self.expected_step_s
        )

    def launch(self, rows: DecodeRows, between_layers: Callable[[], None] | None = None) -> None:
        self._prepare(rows)
        graphs = (self.draft_graphs if rows.drafts else self.graphs)[rows.batch]
        (graphs.simple if rows.simple else graphs.samples)()

    def launch_mixed(self, rows: DecodeRows) -> JoinedRows | None:
        self._prepare(None)
        self.steps.mixed_at = self.steps.launched
        return self.mixed[rows.batch]

    def _prepare(self, rows: DecodeRows | None) -> None:
        """Does what comes before a replay is enqueued: reads the mailbox where nothing runs ahead of it.
        `rows`: None: it is part of a prefill step."""
        steps, masks = self.steps, self.state.sampler.masks
        if steps.queued == 0:
            tail = self.ring.tail
            if not self._has_room(tail):
                self._tail_when_full = tail
            self._began_at = self._clock()
            self.step_state.fetch()  # else what is posted would wait for a step that advances nothing
        self._mask_written &= not masks.arrived
        self._count_launch(rows)

    def observe(self) -> None:
        """Reads what the last step wrote at its end: its status word, whose two counts are truncated, and
        continued from those seen before; and the rows that it advanced, negative where the ring had no room.
        These are written before the word, so they may be of a later step."""
        steps = self.steps
        word = int(self.ring.device_counters[0])
        rows = int(self.ring.device_counters[3].astype(np.int64))
        ended = _continued(steps.ended, word >> kernels.STATUS_REPLAYS.value)
        if more := ended - steps.ended:
            now = self._clock()
            if ended <= steps.launched:  # else replays that no plan launched, at a start
                seconds = (now - self._began_at) / more
                self.times.add(seconds, self.tokens_decoded, more)
                steps.typical_s = self.times.typical_s
                self._count_ended(more, seconds)
            self._began_at = now
        active = word & _ACTIVE_MASK
        steps.saw(
            active=active,
            features=word >> kernels.STATUS_FEATURES.value & _FEATURES_MASK,
            applied=_continued(steps.applied, word >> kernels.STATUS_APPLIED.value),
            ended=ended,
            moves=active > 0 and (rows != 0 or (self._mask_written and self.state.sampler.masks.arrived)),
        )
        if steps.queued == 0:
            tail = self.ring.tail
            steps.room = self._has_room(tail) or tail != self._tail_when_full

    def _has_room(self, tail: int) -> bool:
        """Returns whether a step can advance, with nothing queued. One that cannot is run once, to be
        counted."""
        written = int(self.ring.device_counters[2]) - tail
        return self.ring.capacity - written >= self.shape.least_words


def _continued(before: int, truncated: int) -> int:
    """A count of which only the low bits are known, continued from an earlier value."""
    more: int = truncated - before & _COUNT_MASK
    return before + more
