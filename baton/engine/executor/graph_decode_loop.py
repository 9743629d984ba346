"""The decode loop of a GPU: it enqueues replays of the step's CUDA graph ahead; tokens go from the GPU to the
output ring without passing the host.

After each step the GPU writes a status word to the ring's counters, which `observe` reads. From that and from
the entries posted since, `decode_rows` selects the batch and the sampler of the next step. While every active
slot is held nothing is replayed, until an entry is posted or a mask has been written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from baton.device.cuda_stream import TorchStream
from baton.device.graphs import Graph, GraphStream
from baton.device.host_memory import HostMemory
from baton.device.stream import ComputeStream
from baton.engine.decode.gpu_pass import PassOptions
from baton.engine.decode.graph_step import GraphStep
from baton.engine.decode.joined_rows import JoinedDecodeRows
from baton.engine.decode.slot_state import SlotState
from baton.engine.device_watchdog import DeviceWatchdog, StepTimes
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.kernels.gpu.step import step_kernels as kernels
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.modules import Model
from baton.engine.plan.decode_rows import mixed_batches_up_to
from baton.engine.plan.step_plan import DecodeRows
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.mask_board import SlotMask
from baton.perf_model.step_costs import StepCosts

if TYPE_CHECKING:
    from baton.engine.forward.layer_program import JoinedRows

# Steps end that near to where the typical one would, as a part of it; how soon the host looks again there.
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
    ) -> None:
        """`mixes`: whether steps may be part of prefill steps."""
        self._queue = GraphStream(model.device)
        self.step_state = GraphStep(model, cache, state, rings, memory, self._queue, options)
        batches = mixed_batches_up_to(state.shape.rows) if mixes else []
        mixed = [JoinedDecodeRows(self.step_state, batch) for batch in batches]
        shared = memory.memory
        super().__init__(state, rings.mailbox(shared), rings.writer(shared), rings.positions(shared), mixed)
        self._clock = clock
        self._memory = memory  # registered while the graphs live
        self._graphs = self.step_state.capture()
        self._queue.drain()
        self._times = StepTimes()
        if self._queue.on_chip:
            self._time_largest()
            self.measured_costs = self.measure_costs(cache)
        self._tail_when_full = -1
        # Whether a mask was written that no replay enqueued since is sure to see.
        self._mask_written = False
        self._watchdog = DeviceWatchdog(clock)
        self._began_at = clock()  # when the replay that runs could begin, at the earliest
        self.steps.typical_s = self._times.typical_s
        self._queue.drain()
        self.observe()

    def _time_largest(self) -> None:
        """Runs a step of the largest bucket with no slot active, so that an expected duration is known
        from the start."""
        self._times.add(self._run(self._graphs[self.shape.rows].samples, 1))

    def measure_costs(self, cache: KVCache) -> StepCosts:
        """Measures what steps cost by their sequences and contexts, before there is any."""
        by_rows = self.bucket_seconds()
        batches = [self.shape.slots_of(rows) for rows in by_rows]
        return StepCosts.of_batches(batches, list(by_rows.values()), self._measure_reading(cache))

    def bucket_seconds(self) -> dict[int, float]:
        """Runs steps of each bucket that has room for a slot, with none active → seconds by rows: of all that
        is computed but attention, whose time is that of reading KV. The best of a few tries, since a single
        one that is disturbed would make all larger buckets look as slow."""
        buckets = [rows for rows in sorted(self._graphs) if self.shape.slots_of(rows)]
        return {rows: self._seconds_of(self._graphs[rows].simple) for rows in buckets}

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

        graph = self._queue.capture(copy)
        byte_s = self._seconds_of(graph) / (2 * count)  # read and written
        groups = [cache.layout.groups[number] for number in full]
        return byte_s * sum(group.block_bytes / group.block_tokens for group in groups)

    def _seconds_of(self, step: Graph) -> float:
        """Seconds of one of several steps in a row, without what it takes the host to begin: the best of a
        few tries."""
        one, several = (min(self._run(step, count) for _ in range(_TRIES)) for count in (1, 1 + _TIMED))
        return max(several - one, 0.0) / _TIMED

    def _run(self, step: Graph, count: int) -> float:
        """Runs so many steps on an idle device → seconds until the last one has ended."""
        began = self._clock()
        for _ in range(count):
            step()
        self._queue.drain()
        return self._clock() - began

    @property
    def stream(self) -> ComputeStream | None:
        steps = self._queue.stream
        return None if steps is None else TorchStream(steps.device, steps)

    def write_masks(self, masks: Sequence[SlotMask]) -> None:
        super().write_masks(masks)
        self._mask_written = True

    @property
    def has_work(self) -> bool:
        self.observe()
        return bool(self._mailbox.pending) or self.steps.active > 0

    @property
    def tokens_decoded(self) -> int:
        return int(self.ring.device_counters[1])

    @property
    def expected_step_s(self) -> float:
        return self._times.expected_s

    @property
    def nap_s(self) -> float:
        # A quarter of a step, so that short steps do not leave the device idle until the host polls; shorter
        # around the expected end of the one that runs, which tokens and admissions wait for.
        longest, typical = super().nap_s, self._times.typical_s
        if not typical:
            return longest
        longest, spread = min(longest, typical / 4), typical * _END_SPREAD
        left = self._began_at + typical - self._clock()
        return longest if left < -spread else min(longest, max(left - spread, _NEAR_END_S))

    def device_hung(self) -> bool:
        self.observe()
        steps = self.steps
        return self._watchdog.look(
            pending=steps.queued > 0, progress=steps.ended, expected_step_s=self._times.expected_s
        )

    def launch(self, rows: DecodeRows, between_layers: Callable[[], None] | None = None) -> None:
        self._prepare()
        graphs = self._graphs[rows.batch]
        (graphs.simple if rows.simple else graphs.samples)()

    def launch_mixed(self, rows: DecodeRows) -> JoinedRows | None:
        self._prepare()
        self.steps.mixed_at = self.steps.launched
        return self.mixed[rows.batch]

    def _prepare(self) -> None:
        """Does what comes before a replay is enqueued: reads the mailbox where nothing runs ahead of it."""
        steps, masks = self.steps, self._state.sampler.masks
        if steps.queued == 0:
            tail = self.ring.tail
            if not self._has_room(tail):
                self._tail_when_full = tail
            self._began_at = self._clock()
            self.step_state.fetch()  # else what is posted would wait for a step that advances nothing
        self._mask_written &= not masks.arrived
        steps.launched += 1

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
                self._times.add((now - self._began_at) / more)
                steps.typical_s = self._times.typical_s
            self._began_at = now
        active = word & _ACTIVE_MASK
        steps.saw(
            active=active,
            features=word >> kernels.STATUS_FEATURES.value & _FEATURES_MASK,
            applied=_continued(steps.applied, word >> kernels.STATUS_APPLIED.value),
            ended=ended,
            moves=active > 0 and (rows != 0 or (self._mask_written and self._state.sampler.masks.arrived)),
        )
        if steps.queued == 0:
            tail = self.ring.tail
            steps.room = self._has_room(tail) or tail != self._tail_when_full

    def _has_room(self, tail: int) -> bool:
        """Returns whether a step can advance, with nothing queued. One that cannot is run once, to be
        counted."""
        written = int(self.ring.device_counters[2]) - tail
        return self.ring.capacity - written >= self.shape.words


def _continued(before: int, truncated: int) -> int:
    """A count of which only the low bits are known, continued from an earlier value."""
    more: int = truncated - before & _COUNT_MASK
    return before + more
