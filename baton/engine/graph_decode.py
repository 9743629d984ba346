"""The decode loop of a GPU: two replays of the step's graph are queued, and no token passes through here.

The host knows what the steps tell it: a status word after each, in the ring's counters. From that and from
what it has posted since, it picks a bucket that surely has room (slots only end by themselves) and the
graph whose sampler has what the requests ask for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.device.graphs import Queue
from baton.device.host_memory import HostMemory
from baton.engine.cache import KVCache
from baton.engine.decode import DecodeLoop
from baton.engine.decode_pass import PassOptions
from baton.engine.decoder import Decoder
from baton.engine.graph_step import PICKED, GraphStep
from baton.engine.kernels.gpu import step_kernels as kernels
from baton.engine.mailbox import Entry, EntryKind, Mailbox
from baton.engine.output_ring import RingWriter
from baton.engine.shared_rings import SharedRings
from baton.engine.slot_state import SlotState

# Replays enqueued and not ended: one runs, one waits, so that nothing stands between two steps.
QUEUED = 2
_COUNT_MASK = kernels.STATUS_COUNT_MASK.value
_ACTIVE_MASK = (1 << kernels.STATUS_FEATURES.value) - 1
_FEATURES_MASK = (1 << (kernels.STATUS_APPLIED.value - kernels.STATUS_FEATURES.value)) - 1


@dataclass(frozen=True, slots=True)
class Status:
    """What a step said at its end: slots active and their features, entries applied, replays ended."""

    active: int
    features: int
    applied: int
    replays: int


class GraphDecodeLoop(DecodeLoop):
    """`step` enqueues; tokens come out of the ring when they come."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        state: SlotState,
        rings: SharedRings,
        memory: HostMemory,
        mailbox: Mailbox,
        ring: RingWriter,
        options: PassOptions,
    ) -> None:
        super().__init__(state, mailbox, ring)
        self._slots = rings.slots
        self._memory = memory  # registered while the graphs live
        self._queue = Queue(decoder.device)
        self.step_state = GraphStep(decoder, cache, state, rings, memory, self._queue, options)
        self._graphs = self.step_state.capture()
        self._queue.drain()
        self._enqueued = self._status(0, 0).replays
        self._status_seen = self._status(0, self._enqueued)
        # (number of the entry, features) of admissions that no step is known to have applied.
        self._posted: deque[tuple[int, int]] = deque()
        self._tail_when_full = -1

    def _post(self, entry: Entry) -> None:
        self._mailbox.post(entry)
        if int(entry["kind"][0]) == EntryKind.ADMIT:
            self._posted.append((self._mailbox.posted, int(entry["features"][0])))

    @property
    def has_work(self) -> bool:
        return bool(self._mailbox.pending) or self._look().active > 0

    @property
    def tokens_decoded(self) -> int:
        return int(self._ring.told[1])

    def step(self) -> bool:
        seen = self._look()
        queued = self._enqueued - seen.replays
        if queued >= QUEUED or not (seen.active or self._mailbox.posted > seen.applied):
            return False
        if queued == 0 and not self._ring_has_room():
            return False
        features = seen.features
        for _, more in self._posted:
            features |= more
        bound = min(self._slots, seen.active + len(self._posted))
        bucket = min(bucket for bucket in self._graphs if bucket >= bound)
        graphs = self._graphs[bucket]
        (graphs.samples if features & ~int(PICKED) else graphs.picks).replay()
        self._enqueued += 1
        return True

    def _ring_has_room(self) -> bool:
        """With nothing queued: whether a step can advance. One that cannot is run once, to be counted."""
        tail = self._ring.tail
        room = self._ring.capacity - (int(self._ring.told[2]) - tail)
        if room >= 2 * self._slots:
            return True
        first = tail != self._tail_when_full
        self._tail_when_full = tail
        return first

    def _look(self) -> Status:
        self._status_seen = self._status(self._status_seen.applied, self._status_seen.replays)
        while self._posted and self._posted[0][0] <= self._status_seen.applied:
            self._posted.popleft()
        return self._status_seen

    def _status(self, applied: int, replays: int) -> Status:
        """The word, with its two counts taken up from those seen before."""
        word = int(self._ring.told[0])
        now_applied = word >> kernels.STATUS_APPLIED.value & _COUNT_MASK
        now_replays = word >> kernels.STATUS_REPLAYS.value & _COUNT_MASK
        return Status(
            active=word & _ACTIVE_MASK,
            features=word >> kernels.STATUS_FEATURES.value & _FEATURES_MASK,
            applied=applied + (now_applied - applied & _COUNT_MASK),
            replays=replays + (now_replays - replays & _COUNT_MASK),
        )
