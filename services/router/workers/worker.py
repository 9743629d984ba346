"""One incarnation of a worker as this router sees it: its last description, and the router's own counters."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import grpc.aio

from baton.base.errors import BatonError, ErrorKind
from baton.perf_model import messages
from baton.v1.admin_pb2 import WorkerState
from baton.v1.decode_pb2 import SequenceOutput
from baton.v1.types_pb2 import Attempt, WorkerRole
from baton.v1.worker_pb2 import DescribeResponse
from services.common.observability.logs import get_log
from services.router.request.limits import WorkerLimits
from services.router.workers.backlog import Backlog
from services.router.workers.decode_load import LoadHistory
from services.router.workers.links import Links
from services.router.workers.liveness import FrontProcess, LivenessTimer
from services.router.workers.other_claims import OtherClaims, Precedence, SiblingCounts
from services.router.workers.peer import Peer
from services.router.workers.recent_mean import RecentMean, TpotRatio
from services.router.workers.recent_work import PrefillShare, Turnover
from services.router.workers.worker_error import WorkerError

# Seconds for which a worker that had no room gets no new work,
REFUSED_FOR_S = 0.05
# and those for which no prompt is run for it before its reservation.
_UNCERTAIN_FOR_S = 1.0

_ID_HEX_DIGITS = 12

_log = get_log("worker")


def pool_id(described: DescribeResponse) -> str:
    """The id of a worker's pool: the first 12 hex digits of a digest of everything that defines it."""
    pool = described.pool
    digest = hashlib.sha256()
    for part in (
        pool.model.encode(),
        pool.checkpoint,
        pool.tokenizer,
        pool.kv_format.encode(),
        pool.numerics.encode(),
    ):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:_ID_HEX_DIGITS]


class AttemptOutput(Protocol):
    """The output of a running attempt, which a decode worker's token stream reports to."""

    attempt: int
    emitted: list[int]
    # Whether decode has reserved a slot for the attempt.
    reserved: bool

    def accept_decoded(self, output: SequenceOutput) -> None:
        """Takes tokens of the attempt."""
        ...

    def lose(self, error: BatonError) -> None:
        """Fails the attempt: its sequence is lost."""
        ...


class Worker:
    """One incarnation of a worker. Heartbeats update its description, claims its counters.

    A worker is lost if it is silent for too long (`check_liveness`), reports its end, or is removed. It stays
    lost: when its address answers again, that is a new `Worker`.
    """

    def __init__(
        self,
        peer: Peer,
        described: DescribeResponse,
        on_change: Callable[[], None],
        former_router_ids: tuple[bytes, ...] = (),
        on_orphan: Callable[[Worker, Attempt], None] = lambda worker, attempt: None,
    ) -> None:
        """`former_router_ids`: this router's ids at the same incarnation, if it was lost before. `on_orphan`
        is called with each output of an attempt that no request of this router waits for."""
        self.peer = peer
        self.former_router_ids = former_router_ids
        self.on_orphan = on_orphan
        # Since the last answer to a poll, and since the last message of the token stream.
        self.answers = LivenessTimer()
        self.tokens = LivenessTimer()
        self.front = FrontProcess.of(described)
        # Calls to cancel when it is lost.
        self._calls: set[grpc.aio.Call] = set()
        self.changed = on_change
        self.identity = described.identity
        self.pool = pool_id(described)
        self.weight_format = described.weight_format
        # Shared by the workers of one container, by the registry; empty: unknown.
        self.group = ""
        # Whether new requests may use it; set by `Pools`.
        self.serves = False
        # Whether it prefills what it decodes (a combined worker, role both), decodes, decodes what others
        # have prefilled, and prefills for others. Attributes, since every placement reads them.
        role = self.identity.role
        self.prefills_itself = role == WorkerRole.WORKER_ROLE_BOTH
        self.decodes = self.prefills_itself or role == WorkerRole.WORKER_ROLE_DECODE
        self.receives_handoffs = role == WorkerRole.WORKER_ROLE_DECODE or described.receives_handoffs
        self.prefills_for_others = role == WorkerRole.WORKER_ROLE_PREFILL or self.exchanges
        # Its links to decode workers over which requests failed; and over what it sends and receives blocks.
        self.links = Links(self.name, on_change)
        self._sends_over = frozenset(described.limits.sends_over)
        self._receives_over = frozenset(described.limits.receives_over)
        # The id of this router at this worker. A worker that was lost and found again gets a new id, and
        # ends what it runs for the former one.
        self.router_id = secrets.token_bytes(16)
        self.reachable = True
        self._failed_at = -math.inf
        self.following = False  # whether its token stream is open
        self.lost = False
        self.drained_by_operator = False  # by AdminService.Drain
        self._loss: WorkerError | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._refused_at = -math.inf
        # This router's counters: slots and tokens reserved at decode, tokens that prefill has yet to compute.
        self.claimed_slots = 0
        self.decoding_slots = 0  # of them, those whose prompts are computed
        self.reserved_tokens = 0
        self.queued_tokens = 0
        # Predicted seconds of those prompts, and how fast slots become free.
        self.backlog = Backlog()
        self.turnover = Turnover()
        self.prefill_share = PrefillShare()
        # What its decode steps depend on, over time; and how output tokens compare with predictions.
        self.loads = LoadHistory()
        self.tpot_ratio = TpotRatio()
        # Seconds from placement to first token, of recent requests that were decoded here.
        self.first_token_s = RecentMean()
        # This router's requests at decode: the sum of the tokens that they have on average while they run,
        # and their TPOT limits, in ascending order.
        self.claimed_context = 0
        self.tpot_limits: list[float] = []
        self.others = OtherClaims()
        # Request id → the output of its attempt at this worker.
        self.outputs: dict[bytes, AttemptOutput] = {}
        self.update(described, claimed_before=0, asked_at=time.monotonic())

    @property
    def name(self) -> str:
        """The worker's name, the same for all of its incarnations."""
        return self.identity.name

    @property
    def draining(self) -> bool:
        """True if the worker accepts no new work: it is stopping, or an operator drains it."""
        return self.described.draining or self.drained_by_operator

    def can_prefill_for(self, decode: Worker) -> bool:
        """True if this worker may prefill a sequence for that decode worker, now or once it has room: their
        link has not failed just now."""
        if self is decode:
            return self.prefills_itself and self.alive
        if not (self.prefills_for_others and decode.receives_handoffs and self.alive):
            return False
        if self.described.fingerprint != decode.described.fingerprint or not self.reaches(decode):
            return False
        return not self.links.has_failed(decode)

    def reaches(self, decode: Worker) -> bool:
        """True if it sends blocks over a transport by which that decode worker receives them, as far as both
        say."""
        known = self.described.HasField("limits") and decode.described.HasField("limits")
        return not (known and self._sends_over.isdisjoint(decode._receives_over))

    @property
    def free_slots(self) -> int:
        """Free slots, as far as this router knows."""
        return self.described.load.slots - self.used_slots

    @property
    def has_free_slot(self) -> bool:
        """True if the worker accepts work, and has a free slot for it."""
        return self.accepts_work and self.free_slots > 0

    def slots_left_by(self, precedence: Precedence) -> int:
        """Number of free slots that a request leaves to those that wait in sibling processes and are to be
        placed before it: what becomes free in this process would never reach them. None where the worker runs
        nothing, since what has no room there has none anywhere."""
        if not self.used_slots:
            return 0
        return max(0, min(self.others.siblings.waiting_before(precedence), self.described.load.slots - 1))

    @property
    def used_slots(self) -> int:
        """Slots that are reserved or run, as far as this router knows."""
        return self.claimed_slots + self.others.slots

    @property
    def context_tokens(self) -> int:
        """Tokens of the sequences in them."""
        return self.claimed_context + self.others.context

    @property
    def _decoding(self) -> float:
        """The part of the used slots whose sequences are decoded; of others' slots the same part as of this
        process's."""
        return self.decoding_slots / self.claimed_slots if self.claimed_slots else 1.0

    @property
    def staying(self) -> float:
        """The part of the used slots that is expected to be still used when a prompt that is sent now has its
        first token: by the slots that were released per second lately, and how long recent requests took to
        their first tokens. Sequences that are not decoded yet stay."""
        if not self.used_slots:
            return 1.0
        return 1 - min(self._decoding, self.turnover.per_second * self.first_token_s.value / self.used_slots)

    @property
    def prefill_queue_tokens(self) -> int:
        """Tokens that it has yet to compute for this router and its sibling processes."""
        return self.queued_tokens + self.others.siblings.queued_tokens

    @property
    def prefill_queue_prompts(self) -> int:
        """The prompts that these are of."""
        return self.backlog.prompts + self.others.siblings.queued_prompts

    @property
    def prefills(self) -> bool:
        """True if the worker computes prompts, for itself or for others."""
        return self.prefills_itself or self.prefills_for_others

    @property
    def exchanges(self) -> bool:
        """True for a combined worker that may prefill for others and decode what they prefill."""
        return self.prefills_itself and self.receives_handoffs

    @property
    def caches_prefixes(self) -> bool:
        """True if the worker may have parts of a prompt cached."""
        return bool(self.described.cache_dtype and self.described.load.block_tokens)

    @property
    def alive(self) -> bool:
        """True if the worker answers, accepts new work and, if it decodes, has an open token stream."""
        up = self.reachable and not self.lost and not self.draining
        return up and (self.following or not self.decodes)

    @property
    def accepts_work(self) -> bool:
        """True if the worker is alive and has not just refused a request."""
        return self.alive and self._pause is None

    def has_blocks_for(self, tokens: int) -> bool:
        """True if the worker had free blocks for `tokens` tokens at the last heartbeat."""
        load = self.described.load
        return load.free_blocks * load.block_tokens >= tokens

    @property
    def has_certain_room(self) -> bool:
        """True if a free slot by our counters is certainly free: no other router uses the worker, it has not
        refused a request recently, and there is another one for each sibling process, which may claim a slot
        at the same time."""
        uncertain = time.monotonic() - self._refused_at < _UNCERTAIN_FOR_S
        spare = self.described.load.slots - self.used_slots
        return (
            self.others.other_router_slots == 0 and not uncertain and spare >= self.others.siblings.processes
        )

    def update(self, described: DescribeResponse, claimed_before: int, asked_at: float) -> None:
        """Takes the answer to a poll. `claimed_before`: `claimed_slots` when the poll was sent. `asked_at`:
        that time, in monotonic seconds; a poll sent before a call failed does not make the worker reachable
        again."""
        self.described = described
        self.costs = messages.from_message(described.load.step_costs)
        self.limits = WorkerLimits.of(described)
        self.answers.reset()
        self.reachable = self.reachable or asked_at > self._failed_at
        self.others.update(described.load, max(claimed_before, self.claimed_slots))
        self.load_changed()
        self.changed()

    def load_changed(self) -> None:
        """Records a change of what the worker's steps depend on, as far as this router knows."""
        if self.decodes:
            decoding = self._decoding
            self.loads.changed(decoding * self.used_slots, decoding * self.context_tokens)

    def set_siblings(self, counts: SiblingCounts) -> bool:
        """Takes the claims of sibling processes on the worker; returns True if that may give a request
        room."""
        before = self.others.siblings
        self.others.set_siblings(counts)
        self.backlog.set_siblings(counts.backlog, counts.queued_tokens)
        self.prefill_share.siblings = counts.prefill_share
        self.turnover.siblings = counts.released_per_second
        self.load_changed()
        return (before.slots, before.queued_tokens, before.waiting) != (
            counts.slots, counts.queued_tokens, counts.waiting,
        )  # fmt: skip

    def unreachable(self) -> None:
        """Records that a call failed: the worker gets no new work until it answers a poll."""
        self.reachable = False
        self._failed_at = time.monotonic()
        self.changed()

    def set_drained(self, drained: bool) -> None:
        """Starts or ends an operator's drain; its sequences continue either way."""
        self.drained_by_operator = drained
        self.changed()

    def set_following(self, following: bool) -> None:
        """Records that the token stream was opened or has ended."""
        self.following = following
        self.changed()

    def refused(self) -> None:
        """Records that the worker had no room: it gets no new work for `REFUSED_FOR_S`."""
        self._refused_at = time.monotonic()
        if self._pause is not None:
            self._pause.cancel()
        self._pause = asyncio.get_running_loop().call_later(REFUSED_FOR_S, self._pause_over)

    def _pause_over(self) -> None:
        self._pause = None
        self.changed()

    def check_liveness(self) -> None:
        """Loses the worker if it has not answered, or its token stream has been silent, for too long, unless
        it is starved."""
        no_answer, no_tokens = self.answers.expired(), self.decodes and self.tokens.expired()
        silent_s = max(self.answers.silent_s, self.tokens.silent_s if self.decodes else 0.0)
        if self.front.starved(silent_s):
            return
        if no_answer:
            self.lose("it does not answer")
        elif no_tokens:
            self.lose("its token stream is silent")

    def lose(self, why: str) -> None:
        """Gives up this incarnation: fails the attempts that run on it and cancels every call to it."""
        if self.lost:
            return
        self.lost = True
        _log.warning("worker_lost", worker=self.name, reason=why)
        error = self._loss = WorkerError(ErrorKind.UNAVAILABLE, self.name, f"it was lost: {why}")
        for output in list(self.outputs.values()):
            output.lose(error)
        for call in self._calls:
            call.cancel()
        self.changed()

    @contextlib.contextmanager
    def while_alive(self, call: grpc.aio.Call) -> Iterator[None]:
        """Cancels the call when the worker is lost. Awaiting it then raises BatonError(UNAVAILABLE)."""
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


def state_of(worker: Worker | None) -> WorkerState.ValueType:
    """The state of the worker at an address; None: no worker has answered there yet."""
    if worker is None:
        return WorkerState.WORKER_STATE_STARTING
    if worker.lost:
        return WorkerState.WORKER_STATE_LOST
    if worker.draining:
        return WorkerState.WORKER_STATE_DRAINING
    if worker.alive and not worker.serves:
        return WorkerState.WORKER_STATE_OTHER_POOL
    return WorkerState.WORKER_STATE_READY if worker.alive else WorkerState.WORKER_STATE_UNREACHABLE
