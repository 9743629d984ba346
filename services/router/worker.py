"""One start of one worker, as this router sees it: what it said, and what we have promised it."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from typing import TYPE_CHECKING

from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2_grpc import DecodeServiceStub
from baton.v1.prefill_pb2_grpc import PrefillServiceStub
from baton.v1.types_pb2 import WorkerRole
from baton.v1.worker_pb2_grpc import WorkerServiceStub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import grpc.aio

    from baton.v1.decode_pb2 import SequenceOutput
    from baton.v1.decode_pb2_grpc import DecodeServiceAsyncStub
    from baton.v1.prefill_pb2_grpc import PrefillServiceAsyncStub
    from baton.v1.worker_pb2 import DescribeResponse
    from baton.v1.worker_pb2_grpc import WorkerServiceAsyncStub
    from services.router.sequence import Sequence

# A worker that refused is asked again after this,
REFUSED_FOR_S = 0.05
# and for so long its promise is awaited before a prompt is run for it.
_DOUBTED_FOR_S = 1.0


class Peer:
    """The gRPC channel to one configured address, whoever answers there."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.worker: WorkerServiceAsyncStub = WorkerServiceStub(channel)
        self.prefill: PrefillServiceAsyncStub = PrefillServiceStub(channel)
        self.decode: DecodeServiceAsyncStub = DecodeServiceStub(channel)


class Worker:
    """One incarnation. Heartbeats update what it said; claims move the counters.

    A lost worker stays lost: when its address answers again, that is a new `Worker`.
    """

    def __init__(self, peer: Peer, described: DescribeResponse, on_change: Callable[[], None]) -> None:
        self.peer = peer
        self.changed = on_change
        self.identity = described.identity
        # What we call ourselves to it. A worker that was lost and found again hears a new name, so what
        # it still runs under the old one has no router any more and ends by decode's own grace.
        self.router_id = secrets.token_bytes(16)
        self.reachable = True
        self._failed_at = -math.inf
        # Its Follow stream of ours is open.
        self.following = False
        self.lost = False
        self._pause: asyncio.TimerHandle | None = None
        self._refused_at = -math.inf
        # Our own live counters: slots and tokens promised by its tickets, tokens prefill has yet
        # to compute for us.
        self.claimed_slots = 0
        self.promised_tokens = 0
        self.queued_tokens = 0
        # Slots that others use, judged at the last heartbeat.
        self.foreign_slots = 0
        # By request id: whose tokens this worker may send us.
        self.sequences: dict[bytes, Sequence] = {}
        self.update(described, claimed_before=0, asked_at=time.monotonic())

    @property
    def name(self) -> str:
        """The worker's stable name."""
        return self.identity.name

    @property
    def decodes(self) -> bool:
        """Whether it generates."""
        return self.identity.role in (WorkerRole.WORKER_ROLE_DECODE, WorkerRole.WORKER_ROLE_BOTH)

    @property
    def prefills_itself(self) -> bool:
        """Role both: its sequences are prefilled where they are decoded."""
        return self.identity.role == WorkerRole.WORKER_ROLE_BOTH

    @property
    def prefills_for_others(self) -> bool:
        """Whether it computes prompts for decode workers."""
        return self.identity.role == WorkerRole.WORKER_ROLE_PREFILL

    @property
    def free_slots(self) -> int:
        """Slots nobody holds, as far as we know."""
        return self.described.load.slots - self.claimed_slots - self.foreign_slots

    @property
    def alive(self) -> bool:
        """It answers, takes new work, and (where it decodes) its tokens reach us."""
        up = self.reachable and not self.lost and not self.described.draining
        return up and (self.following or not self.decodes)

    @property
    def asks_for_work(self) -> bool:
        """Alive, and it has not just refused."""
        return self.alive and self._pause is None

    @property
    def sure_of_room(self) -> bool:
        """We alone fill its slots, so our counters tell how many it has, and it has not refused of late."""
        doubted = time.monotonic() - self._refused_at < _DOUBTED_FOR_S
        return self.foreign_slots == 0 and not doubted

    def update(self, described: DescribeResponse, claimed_before: int, asked_at: float) -> None:
        """Takes a heartbeat; `claimed_before` is `claimed_slots` when it was asked for. One asked for before
        a call failed, by `time.monotonic`, says nothing of whether the worker answers again."""
        self.described = described
        self.reachable = self.reachable or asked_at > self._failed_at
        used = described.load.slots - described.load.free_slots
        self.foreign_slots = max(0, used - max(claimed_before, self.claimed_slots))
        self.changed()

    def unreachable(self) -> None:
        """A call failed: no new work until the next heartbeat."""
        self.reachable = False
        self._failed_at = time.monotonic()
        self.changed()

    def set_following(self, following: bool) -> None:
        """The Follow stream was opened or broke."""
        self.following = following
        self.changed()

    def refused(self) -> None:
        """It had no room: it is left alone for a moment."""
        self._refused_at = time.monotonic()
        if self._pause is not None:
            self._pause.cancel()
        self._pause = asyncio.get_running_loop().call_later(REFUSED_FOR_S, self._pause_over)

    def _pause_over(self) -> None:
        self._pause = None
        self.changed()

    def lose(self, why: str) -> None:
        """Gives this incarnation up: every sequence on it goes on elsewhere."""
        if self.lost:
            return
        self.lost = True
        error = BatonError(ErrorKind.UNAVAILABLE, f"worker {self.name} was lost: {why}")
        for sequence in list(self.sequences.values()):
            sequence.lose(error)
        self.changed()

    def deliver(self, outputs: Iterable[SequenceOutput]) -> None:
        """Hands tokens to their sequences; what nobody waits for any more is dropped."""
        for output in outputs:
            sequence = self.sequences.get(output.attempt.request_id)
            if sequence is not None:
                sequence.accept_decoded(output)
