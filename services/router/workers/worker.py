"""One start of one worker, as this router sees it: what it said, and what we have promised it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from typing import TYPE_CHECKING

from baton.errors import ErrorKind
from baton.v1.decode_pb2_grpc import DecodeServiceStub
from baton.v1.prefill_pb2_grpc import PrefillServiceStub
from baton.v1.types_pb2 import WorkerRole
from baton.v1.worker_pb2_grpc import WorkerServiceStub
from services.common.observability.logs import get_log
from services.router.request.pool import pool_id
from services.router.workers.silence import Silence
from services.router.workers.worker_error import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import grpc.aio

    from baton.v1.decode_pb2 import SequenceOutput
    from baton.v1.decode_pb2_grpc import DecodeServiceAsyncStub
    from baton.v1.prefill_pb2_grpc import PrefillServiceAsyncStub
    from baton.v1.types_pb2 import Attempt
    from baton.v1.worker_pb2 import DescribeResponse
    from baton.v1.worker_pb2_grpc import WorkerServiceAsyncStub
    from services.router.request.output_state import Sequence

# A worker that refused is asked again after this,
REFUSED_FOR_S = 0.05
# and for so long its promise is awaited before a prompt is run for it.
_DOUBTED_FOR_S = 1.0

_log = get_log("worker")


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

    A lost worker stays lost: when its address answers again, that is a new `Worker`. What is lost is what has
    been silent for too long (`judge`), what ended its token stream for good, and what was removed.
    """

    def __init__(
        self,
        peer: Peer,
        described: DescribeResponse,
        on_change: Callable[[], None],
        former_router_ids: tuple[bytes, ...] = (),
        on_orphan: Callable[[Worker, Attempt], None] = lambda worker, attempt: None,
    ) -> None:
        """`former_router_ids`: under which this start of it was followed before and lost. `on_orphan` is
        called with each output of an attempt that this router does not wait for."""
        self.peer = peer
        self.former_router_ids = former_router_ids
        self._on_orphan = on_orphan
        # Since it last answered, and since its token stream last brought a message.
        self.answers = Silence()
        self.tokens = Silence()
        # Calls to it that must not outlast it.
        self._calls: set[grpc.aio.Call] = set()
        self.changed = on_change
        self.identity = described.identity
        # Its pool's id, how its weights are kept, and whether new requests may use it, which `Pools` sets.
        self.pool = pool_id(described)
        self.weight_format = described.weight_format
        self.serves = False
        # Whether it generates; whether its sequences are prefilled where they are decoded (role both), and
        # whether it computes prompts for decode workers. They are read for each placement.
        role = self.identity.role
        self.decodes = role in (WorkerRole.WORKER_ROLE_DECODE, WorkerRole.WORKER_ROLE_BOTH)
        self.prefills_itself = role == WorkerRole.WORKER_ROLE_BOTH
        self.prefills_for_others = role == WorkerRole.WORKER_ROLE_PREFILL
        # The id of this router at this worker. A worker that was lost and found again gets a new one, and
        # ends what it still runs under the old one.
        self.router_id = secrets.token_bytes(16)
        self.reachable = True
        self._failed_at = -math.inf
        # Its Follow stream of ours is open.
        self.following = False
        self.lost = False
        # Set by an operator: this router places nothing new here (AdminService.Drain).
        self.drained_by_operator = False
        self._loss: WorkerError | None = None
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
    def draining(self) -> bool:
        """Whether it takes no new work: it is stopping, or an operator drains it."""
        return self.described.draining or self.drained_by_operator

    def can_prefill_for(self, decode: Worker) -> bool:
        """Whether a sequence that is decoded there may be prefilled here, now or when there is room."""
        if decode.prefills_itself:
            return self is decode and self.alive
        if not (self.prefills_for_others and self.alive):
            return False
        return self.described.fingerprint == decode.described.fingerprint

    @property
    def free_slots(self) -> int:
        """Slots nobody holds, as far as we know."""
        return self.described.load.slots - self.claimed_slots - self.foreign_slots

    @property
    def alive(self) -> bool:
        """It answers, takes new work, and (where it decodes) its tokens reach us."""
        up = self.reachable and not self.lost and not self.draining
        return up and (self.following or not self.decodes)

    @property
    def asks_for_work(self) -> bool:
        """Alive, and it has not just refused."""
        return self.alive and self._pause is None

    def has_blocks_for(self, tokens: int) -> bool:
        """Whether it had blocks for so many tokens when it last answered."""
        load = self.described.load
        return load.free_blocks * load.block_tokens >= tokens

    @property
    def sure_of_room(self) -> bool:
        """We alone fill its slots, so our counters tell how many it has, and it has not refused of late."""
        doubted = time.monotonic() - self._refused_at < _DOUBTED_FOR_S
        return self.foreign_slots == 0 and not doubted

    def update(self, described: DescribeResponse, claimed_before: int, asked_at: float) -> None:
        """Takes a heartbeat; `claimed_before` is `claimed_slots` when it was asked for. One asked for before
        a call failed, by `time.monotonic`, says nothing of whether the worker answers again."""
        self.described = described
        self.answers.heard()
        self.reachable = self.reachable or asked_at > self._failed_at
        used = described.load.slots - described.load.free_slots
        self.foreign_slots = max(0, used - max(claimed_before, self.claimed_slots))
        self.changed()

    def unreachable(self) -> None:
        """A call failed: no new work until the next heartbeat."""
        self.reachable = False
        self._failed_at = time.monotonic()
        self.changed()

    def set_drained(self, drained: bool) -> None:
        """Starts or ends an operator's drain; sequences on it go on either way."""
        self.drained_by_operator = drained
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

    def judge(self) -> None:
        """Gives the worker up where it is silent: it answers no calls, or its token stream brings nothing."""
        no_answer, no_tokens = self.answers.look(), self.tokens.look()
        if no_answer:
            self.lose("it does not answer")
        elif no_tokens and self.decodes:
            self.lose("its token stream is silent")

    def lose(self, why: str) -> None:
        """Gives this incarnation up: every sequence on it goes on elsewhere, and every call to it ends."""
        if self.lost:
            return
        self.lost = True
        _log.warning("worker_lost", worker=self.name, reason=why)
        error = self._loss = WorkerError(ErrorKind.UNAVAILABLE, self.name, f"it was lost: {why}")
        for sequence in list(self.sequences.values()):
            sequence.lose(error)
        for call in self._calls:
            call.cancel()
        self.changed()

    @contextlib.contextmanager
    def while_alive(self, call: grpc.aio.Call) -> Iterator[None]:
        """Ends the call when the worker is lost; what awaits it here then raises BatonError(UNAVAILABLE)."""
        self._calls.add(call)
        if self.lost:
            call.cancel()
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._loss is None or (task is not None and task.cancelling()):
                raise
            raise self._loss from None
        finally:
            self._calls.discard(call)

    def deliver(self, outputs: Iterable[SequenceOutput]) -> None:
        """Hands tokens to their sequences. What this router does not wait for is to end at the worker."""
        for output in outputs:
            sequence = self.sequences.get(output.attempt.request_id)
            if sequence is not None and sequence.attempt == output.attempt.number:
                sequence.accept_decoded(output)
            elif not output.finish_reason:
                self._on_orphan(self, output.attempt)
