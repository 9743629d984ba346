"""The decode loop of a GPU: it enqueues replays of the step's CUDA graph ahead; tokens go from the GPU to the
output ring without passing the host.

After each step the GPU writes a status word to the ring's counters. From that and from the entries posted
since, the host selects a bucket that surely has room (slots only end by themselves), and the graph whose
sampler has the features that the requests use. While every active slot is held nothing is replayed, until an
entry is posted or a mask has been written.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.device.cuda_stream import TorchStream
from baton.device.graphs import Graph, GraphStream
from baton.device.host_memory import HostMemory
from baton.device.stream import ComputeStream
from baton.engine.decode.gpu_pass import PassOptions
from baton.engine.decode.graph_step import SIMPLE, GraphStep
from baton.engine.decode.joined_rows import JoinedDecodeRows, joined_buckets
from baton.engine.decode.loop import DecodeLoop
from baton.engine.decode.slot_state import SlotState
from baton.engine.device_watchdog import DeviceWatchdog, StepTimes
from baton.engine.kernels.gpu.step import step_kernels as kernels
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.modules import Model
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.mailbox import Entry, EntryKind
from baton.engine.shared_memory.mask_board import SlotMask
from baton.perf_model.step_costs import StepCosts

# Replays enqueued and not ended: one runs, one is queued, so that steps follow one another without a gap. Two
# steps shorter than `_SHORT_S` may end before the host polls again, so of those one more is queued.
QUEUED, QUEUED_SHORT = 2, 3
_SHORT_S = 0.002
# Rows that a replay has beyond those it needs, for admissions that are posted while it waits for its turn: as
# many as arrive in one step at most, on a worker that keeps up.
_MOST_EXPECTED = 4
# Steps end that near to where the typical one would, as a part of it; how soon the host looks again there.
_END_SPREAD, _NEAR_END_S = 1 / 8, 0.0001
# Steps in a row by which a bucket is timed, beside one more, and how often that is tried.
_TIMED, _TRIES = 4, 2
# Far more than a device's caches hold.
_COPIED_BYTES = 1 << 29
_COUNT_MASK = kernels.STATUS_COUNT_MASK.value
_ACTIVE_MASK = (1 << kernels.STATUS_FEATURES.value) - 1
_FEATURES_MASK = (1 << (kernels.STATUS_APPLIED.value - kernels.STATUS_FEATURES.value)) - 1


@dataclass(frozen=True, slots=True)
class Status:
    """What the last step wrote at its end: slots active and their features, entries applied, replays ended.

    `rows`: rows that it advanced, negative where the ring had no room. It is written before the rest, so it
    may be that of a later step.
    """

    active: int
    features: int
    applied: int
    replays: int
    rows: int


class GraphDecodeLoop(DecodeLoop):
    """`step` enqueues a replay; its tokens appear in the ring when it has run."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        state: SlotState,
        rings: SharedRings,
        memory: HostMemory,
        options: PassOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        shared = memory.memory
        super().__init__(state, rings.mailbox(shared), rings.writer(shared), rings.positions(shared))
        self._clock = clock
        self._memory = memory  # registered while the graphs live
        self._queue = GraphStream(model.device)
        self.step_state = GraphStep(model, cache, state, rings, memory, self._queue, options)
        self._graphs = self.step_state.capture()
        self._queue.drain()
        self._times = StepTimes()
        self._costs = StepCosts()
        if self._queue.on_chip:
            self._time_largest()
            self._costs = self._measure_curve(cache)
        self._joins: dict[int, JoinedDecodeRows] = {}
        self.resume()
        # (number of the entry, features) of admissions that no step is known to have applied.
        self._posted: deque[tuple[int, int]] = deque()
        self._expected = 0
        self._behind_prefill = self._before_joining = False
        # Replays that had been enqueued when the last one joined a prefill step, itself included.
        self._joined = 0
        self._tail_when_full = -1
        # Whether a mask was written that no replay enqueued since is sure to see.
        self._mask_written = False
        self._watchdog = DeviceWatchdog(clock)
        self._began_at = clock()  # when the replay that runs could begin, at the earliest

    def joined_rows(self) -> list[JoinedDecodeRows]:
        rows = [JoinedDecodeRows(self.step_state, bucket) for bucket in joined_buckets(self.shape.rows)]
        self._joins = {each.rows: each for each in rows}
        return rows

    def resume(self) -> None:
        self._queue.drain()
        self._enqueued = self._status(0, 0).replays
        self._status_seen = self._status(0, self._enqueued)

    def _time_largest(self) -> None:
        """Runs a step of the largest bucket with no slot active, so that an expected duration is known
        from the start."""
        self._times.add(self._run(self._graphs[self.shape.rows].samples, 1))

    def _measure_curve(self, cache: KVCache) -> StepCosts:
        """Runs steps of each bucket with no slot active: all is computed but attention, whose time is that of
        reading KV. The best of a few tries, since a single one that is disturbed would make all larger
        buckets look as slow."""
        buckets = sorted(self._graphs)
        best = [self._seconds_of(self._graphs[each].simple) for each in buckets]
        return StepCosts.of_batches(buckets, best, self._measure_reading(cache))

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
        """Of one of several steps in a row, without what it takes the host to begin; by the best of a few
        tries."""
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
    def measured_costs(self) -> StepCosts:
        return self._costs

    def _post(self, entry: Entry) -> None:
        self._mailbox.post(entry)
        if int(entry["kind"][0]) == EntryKind.ADMIT:
            self._posted.append((self._mailbox.posted, int(entry["features"][0])))

    def expect_admissions(self, count: int) -> None:
        self._expected = count

    def prefill_stream(self) -> ComputeStream | None:
        steps = self._queue.stream
        return None if steps is None else TorchStream(steps.device, steps)

    def expect_prefill(self, *, under_way: bool, follows: bool = False) -> None:
        self._behind_prefill, self._before_joining = under_way, follows

    def write_masks(self, masks: Sequence[SlotMask]) -> None:
        super().write_masks(masks)
        self._mask_written = True

    @property
    def has_work(self) -> bool:
        return bool(self._mailbox.pending) or self._look().active > 0

    @property
    def tokens_decoded(self) -> int:
        return int(self.ring.device_counters[1])

    @property
    def steps_under_way(self) -> int:
        return self._enqueued - self._look().replays

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
        seen = self._look()
        pending = self._enqueued > seen.replays
        return self._watchdog.look(
            pending=pending, progress=seen.replays, expected_step_s=self._times.expected_s
        )

    def step(self, between_layers: Callable[[], None] | None = None) -> bool:
        seen = self._look()
        queued = self._enqueued - seen.replays
        most = QUEUED_SHORT if 0 < self._times.typical_s < _SHORT_S else QUEUED
        # While a replay that joined the prefill step has not ended, that takes no other one's place.
        most -= self._behind_prefill and seen.replays >= self._joined
        if self._before_joining or queued >= most or not self._would_advance(seen):
            return False
        if not self._begin_queue(queued):
            return False
        slots, features = self._next(seen)
        bucket = min(bucket for bucket in self._graphs if bucket >= slots)
        graphs = self._graphs[bucket]
        (graphs.samples if features & ~int(SIMPLE) else graphs.simple)()
        self._enqueued += 1
        return True

    @property
    def joined_last(self) -> bool:
        return self._enqueued == self._joined

    @property
    def rows_to_join(self) -> int:
        seen = self._look()
        slots, features = self._next(seen)
        if not self._joins or features & ~int(SIMPLE) or not self._would_advance(seen):
            return 0
        return min(bucket for bucket in self._joins if bucket >= slots)

    def join(self) -> JoinedDecodeRows | None:
        rows = self.rows_to_join
        if not rows or not self._begin_queue(self._enqueued - self._look().replays):
            return None
        self._enqueued += 1
        self._joined = self._enqueued
        return self._joins[rows]

    def _next(self, seen: Status) -> tuple[int, int]:
        """Rows that the next replay has at most, and the features that it may need."""
        features = seen.features
        for _, more in self._posted:
            features |= more
        # Entries may be posted until this replay begins, and it is enqueued up to a step before.
        slots = seen.active + len(self._posted) + min(self._expected, _MOST_EXPECTED)
        return self.shape.rows_of(min(self.shape.slots, slots)), features

    def _begin_queue(self, queued: int) -> bool:
        """To be called before a replay is enqueued behind `queued` others; False where it has no room."""
        if queued == 0:
            if not self._ring_has_room():
                return False
            self._began_at = self._clock()
            self.step_state.fetch()  # else what is posted would wait for a step that advances nothing
        self._mask_written &= not self._state.sampler.masks.arrived
        return True

    def _would_advance(self, seen: Status) -> bool:
        """Whether another replay would have an effect. After a step that advanced no row none does,
        until an entry is posted (an admission, more blocks, an end) or a mask has reached the device."""
        if self._mailbox.posted > seen.applied:
            return True
        if not seen.active:
            return False
        return seen.rows != 0 or (self._mask_written and self._state.sampler.masks.arrived)

    def _ring_has_room(self) -> bool:
        """With nothing queued: whether a step can advance. One that cannot is run once, to be counted."""
        tail = self.ring.tail
        room = self.ring.capacity - (int(self.ring.device_counters[2]) - tail)
        if room >= self.shape.words:
            return True
        first = tail != self._tail_when_full
        self._tail_when_full = tail
        return first

    def _look(self) -> Status:
        before = self._status_seen
        self._status_seen = self._status(before.applied, before.replays)
        if ended := self._status_seen.replays - before.replays:
            now = self._clock()
            self._times.add((now - self._began_at) / ended)
            self._began_at = now
        while self._posted and self._posted[0][0] <= self._status_seen.applied:
            self._posted.popleft()
        return self._status_seen

    def _status(self, applied: int, replays: int) -> Status:
        """Decodes the status word; its two counts are truncated, and continued from those seen before."""
        word = int(self.ring.device_counters[0])
        rows = int(self.ring.device_counters[3].astype(np.int64))
        now_applied = word >> kernels.STATUS_APPLIED.value & _COUNT_MASK
        now_replays = word >> kernels.STATUS_REPLAYS.value & _COUNT_MASK
        return Status(
            active=word & _ACTIVE_MASK,
            features=word >> kernels.STATUS_FEATURES.value & _FEATURES_MASK,
            applied=applied + (now_applied - applied & _COUNT_MASK),
            replays=replays + (now_replays - replays & _COUNT_MASK),
            rows=rows,
        )
