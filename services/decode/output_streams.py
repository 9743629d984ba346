"""The output of decode's sequences, and how much of it each router has been sent.

An output stream belongs to one sequence: its attempt, its slot and generation, every output token from its
first number on. Each stream has a watermark; `collect` returns what is beyond it in messages of bounded size,
so a slow router gets fewer, larger messages and delays no other. A router that opens its stream again states
the position of each of its sequences and receives the rest; it drops duplicates by (attempt, number).

An ended output is kept until its router has been sent all of it and `LINGER_S` longer, however slow the
router is, unless that is disconnected for `LINGER_S`. Ended outputs take `RETAINED_BYTES` at most. A router
whose output is dropped for that is told so with the next message (`unknown`), and has another attempt
continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baton.base.errors import BatonError, ErrorKind
from baton.engine.shared_memory.output_ring import Finish, Record
from baton.engine.shared_memory.slot_progress import Progress
from baton.v1.decode_pb2 import Position, SubscribeResponse
from baton.v1.types_pb2 import Attempt, Failure
from services.common.engine.attempt_key import AttemptKey
from services.common.engine.logprobs import logprobs_message
from services.decode.ended_outputs import EndedOutputs
from services.decode.output_stream import OutputStream, add_output
from services.decode.slot_span import SlotSpan

# How long an output is kept once it has ended and was sent, and one whose router is disconnected.
LINGER_S = 10.0
# The most memory of all ended outputs, approximately.
RETAINED_BYTES = 64 << 20
# The most attempts of one router whose output was dropped and that it has not been told of; one more ends its
# connection, and it learns of all of them when it opens the next.
_MOST_DROPPED = 1024
TICKET_GRACE_S = 2.0  # how long a reservation outlives its router's connection
# The most bytes that one message should have; a token with 20 logprobs takes 229.
MESSAGE_BYTES = 1 << 18
# Tokens that a sequence begins with: prefill's, which a slot's first word repeats, and its own first one.
_BEGINNING = 2


class UnknownSequenceError(Exception):
    """A record of the output ring is of a sequence that was never registered."""


@dataclass(slots=True, eq=False)
class _Router:
    connection: int = 0  # number of its latest Subscribe call; only that is served
    # The router has discarded this id; the sequences of it are to end.
    discarded: bool = False
    lost_at: float | None = None
    dirty: dict[AttemptKey, OutputStream] = field(default_factory=dict)
    # Attempts whose output was dropped unsent.
    dropped: list[Attempt] = field(default_factory=list)
    # The last message had beginnings alone and left something: the next one has all there is.
    passed_over: bool = False


class OutputStreams:
    """All output streams of a worker, by attempt, by slot and by router."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        retained_bytes: int = RETAINED_BYTES,
        progress: Callable[[int, int], Progress] = lambda slot, generation: Progress(),
    ) -> None:
        """`retained_bytes`: bounds the memory of ended outputs. `progress`: returns what the steps of the
        sequence in a slot and generation have done so far."""
        self._clock = clock
        self._retained_bytes = retained_bytes
        self._progress = progress
        self.ended = EndedOutputs()
        # Outputs that were dropped before their routers had been sent all of them.
        self.dropped_unsent = 0
        self._by_key: dict[AttemptKey, OutputStream] = {}
        self._by_slot: dict[tuple[int, int], OutputStream] = {}
        self._routers: dict[bytes, _Router] = {}

    @property
    def live(self) -> int:
        """Streams whose slot may still emit."""
        return len(self._by_slot)

    def reserve(
        self,
        attempt: Attempt,
        router_id: bytes,
        first_number: int,
        slot: int,
        generation: int,
        span: SlotSpan | None = None,
        *,
        always_counted: bool = False,
    ) -> None:
        """Registers a reservation; idempotent. Output of an ended reservation of the same attempt is dropped:
        it is repeated from the first token on. `span`: what is recorded at its end. `always_counted`: every
        message has what its steps did."""
        key = AttemptKey.of(attempt)
        former = self._by_key.get(key)
        if former is not None:
            if (former.slot, former.generation) == (slot, generation):
                return
            self._by_slot.pop((former.slot, former.generation), None)
            self._drop(key, former)
        stream = OutputStream(
            attempt, router_id, slot, generation, first_number, span=span, always_counted=always_counted
        )
        self._by_key[key] = stream
        self._by_slot[slot, generation] = stream
        self._router(router_id)

    def emit(self, record: Record) -> list[int] | None:
        """Adds one record of the output ring; returns the sequence's whole output if it was the last one,
        else None. Raises UnknownSequenceError if its slot was not reserved in its generation."""
        stream = self._by_slot.get((record.slot, record.generation))
        if stream is None:
            raise UnknownSequenceError
        if record.has_token:
            if record.logprobs is not None:
                stream.logprobs.append(logprobs_message(record.logprobs).SerializeToString())
            stream.token_ids.append(record.token)
            if stream.span is not None and not stream.span.first_ns:
                stream.span.first_ns = time.monotonic_ns()
        ends = record.finish is not Finish.NONE
        if ends:
            stream.progress = self._progress(record.slot, record.generation)
            self._finish(stream, record.finish)
        self._mark(stream)
        return stream.token_ids if ends else None

    def end_unused(self, attempt: Attempt) -> None:
        """Ends the stream of a reservation whose slot was never active."""
        stream = self._by_key.get(AttemptKey.of(attempt))
        if stream is not None and stream.finish is Finish.NONE:
            self._finish(stream, Finish.CANCELLED)
            self._mark(stream)

    def fail(self, slot: int, generation: int, failure: Failure) -> Attempt | None:
        """Records why a sequence cannot continue: its cancellation will report it. Returns its attempt,
        for the caller to cancel; None where the slot has ended."""
        stream = self._by_slot.get((slot, generation))
        if stream is None:
            return None
        stream.failure = failure
        return stream.attempt

    def attach(self, attempt: Attempt, router_id: bytes, next_number: int) -> None:
        """Moves a stream to another router, which receives it from `next_number` on. Raises BatonError:
        NOT_FOUND for an unknown attempt, INVALID for a token that is neither emitted nor next."""
        stream = self._by_key.get(AttemptKey.of(attempt))
        if stream is None:
            raise BatonError(ErrorKind.NOT_FOUND, "this worker has no such attempt")
        behind = next_number - stream.first_number
        if not 0 <= behind <= len(stream.token_ids):
            raise BatonError(ErrorKind.INVALID, f"token {next_number} is neither emitted nor next")
        self._router(stream.router_id).dirty.pop(AttemptKey.of(attempt), None)
        stream.router_id = router_id
        stream.sent, stream.sent_finish = behind, False
        self._mark(stream)

    def follow(
        self, router_id: bytes, positions: Iterable[Position] = (), former: Iterable[bytes] = ()
    ) -> tuple[int, list[Attempt]]:
        """Opens a router's connection. `positions`: where to continue its sequences; any other of its
        sequences is sent from its first number on. `former`: ids that the router has discarded.

        Returns the connection's number, and the attempts of `positions` that are unknown here.
        """
        for one in former:
            self._discard(one)
        router = self._router(router_id)
        router.connection += 1
        router.lost_at = None
        wanted = {AttemptKey.of(position.attempt): position for position in positions}
        for key, stream in self._by_key.items():
            if stream.router_id == router_id:
                position = wanted.pop(key, None)
                behind = 0 if position is None else position.next_number - stream.first_number
                # Prefill may have sent it a token that has not been emitted here yet.
                stream.sent, stream.sent_finish = min(max(behind, 0), len(stream.token_ids)), False
                self._mark(stream)
        return router.connection, [position.attempt for position in wanted.values()]

    def _discard(self, router_id: bytes) -> None:
        """Ends the connection of a discarded router id; the next `sweep` cancels its sequences."""
        router = self._routers.get(router_id)
        if router is not None:
            router.connection += 1
            router.discarded, router.lost_at = True, self._clock()

    def is_current(self, router_id: bytes, connection: int) -> bool:
        """True if this is the router's latest connection and its id has not been discarded."""
        router = self._routers.get(router_id)
        return router is not None and router.connection == connection

    def unfollow(self, router_id: bytes, connection: int) -> None:
        """Records that a router's connection was closed; nothing where it was not the latest."""
        if self.is_current(router_id, connection):
            self._routers[router_id].lost_at = self._clock()

    def collect(self, router_id: bytes, step: int) -> SubscribeResponse | None:
        """Returns output beyond this router's watermarks, about `MESSAGE_BYTES` at most, and advances them;
        None where there is none. The rest follows with the next call.

        Sequences that begin come first, in every other message alone: their clients wait since prefill's
        first token, and a router takes some ten microseconds for each output before theirs.
        """
        router = self._routers[router_id]
        dirty = router.dirty
        if not (dirty or router.dropped):
            return None
        keys = [key for key, stream in dirty.items() if stream.sent < _BEGINNING]
        alone = bool(keys) and not router.passed_over
        if not alone:
            keys += [key for key, stream in dirty.items() if stream.sent >= _BEGINNING]
        message, room = SubscribeResponse(step=step, unknown=router.dropped), MESSAGE_BYTES
        router.dropped.clear()
        for key in keys:
            if room <= 0:
                break
            stream = dirty.pop(key)
            if stream.always_counted and stream.finish is Finish.NONE:
                stream.progress = self._progress(stream.slot, stream.generation)
            room -= add_output(message, stream, room)
            if stream.sent_finish:
                stream.sent_at = self._clock()
            self._mark(stream)  # the rest of it behind the others
        router.passed_over = alone and bool(dirty)
        return message

    def sweep(self) -> list[Attempt]:
        """Drops ended outputs that no router will ask for; returns the attempts to cancel since their router
        is gone."""
        now = self._clock()
        orphans = []
        for key, stream in list(self._by_key.items()):
            router = self._router(stream.router_id)
            lost_for = 0.0 if router.lost_at is None else now - router.lost_at
            if stream.ended_at is not None:
                unneeded_for = (
                    min(now - stream.ended_at, lost_for) if stream.has_unsent else now - stream.sent_at
                )
                if unneeded_for > LINGER_S:
                    self._drop(key, stream)
            elif router.discarded or lost_for > (LINGER_S if stream.token_ids else TICKET_GRACE_S):
                orphans.append(stream.attempt)
        self._free_memory()
        self._forget_idle_routers(now)
        return orphans

    def _finish(self, stream: OutputStream, finish: Finish) -> None:
        stream.finish = finish
        stream.ended_at = self._clock()
        self._by_slot.pop((stream.slot, stream.generation), None)
        if stream.span is not None:
            stream.span.record(stream.slot, finish, len(stream.token_ids), stream.drafts)

    def _free_memory(self) -> None:
        """Drops ended outputs until the others are within their memory, and has their routers told."""
        while self.ended.total_bytes > self._retained_bytes:
            key, stream = next(iter(self.ended))
            self._drop(key, stream)
            if stream.has_unsent:
                self.dropped_unsent += 1
                router = self._router(stream.router_id)
                router.dropped.append(stream.attempt)
                if len(router.dropped) > _MOST_DROPPED:
                    router.dropped.clear()
                    router.connection += 1
                    router.lost_at = self._clock()

    def _mark(self, stream: OutputStream) -> None:
        """Takes notice of what of a stream is unsent."""
        if stream.has_unsent:
            self._router(stream.router_id).dirty[AttemptKey.of(stream.attempt)] = stream
        if stream.ended_at is not None:
            self.ended.put(AttemptKey.of(stream.attempt), stream)

    def _drop(self, key: AttemptKey, stream: OutputStream) -> None:
        del self._by_key[key]
        self.ended.remove(key)
        self._router(stream.router_id).dirty.pop(key, None)

    def _router(self, router_id: bytes) -> _Router:
        router = self._routers.get(router_id)
        if router is None:
            # Not following yet: its grace starts now.
            router = self._routers[router_id] = _Router(lost_at=self._clock())
        return router

    def _forget_idle_routers(self, now: float) -> None:
        used = {stream.router_id for stream in self._by_key.values()}
        for router_id, router in list(self._routers.items()):
            gone = router.lost_at is not None and now - router.lost_at > LINGER_S
            if gone and router_id not in used:
                del self._routers[router_id]
