"""What decode has emitted, and how much of it each router has been told.

A stream is one sequence: its attempt, its slot and generation, every output token from its first
number on. It outlives its slot until its router has received the end, or `LINGER_S`. Each router has a
watermark a stream; `collect` gives what is beyond it in messages of bounded size, so a slow router gets
fewer, larger messages and delays no other. A router that follows anew says where each of its streams stands,
and gets the rest; it drops what it has by (attempt, number).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baton.engine.rings.output_ring import Finish, Record
from baton.errors import BatonError, ErrorKind
from baton.v1 import types_pb2
from baton.v1.decode_pb2 import FollowResponse, Position
from baton.v1.types_pb2 import Attempt, FinishReason
from services.common.attempt_key import AttemptKey
from services.common.logprobs import logprobs_message

LINGER_S = 10.0  # how long an ended stream, or one without a router, is kept
TICKET_GRACE_S = 2.0  # how long a reservation outlives its router's stream
# The most that one message should hold; a token of 20 logprobs takes 229 bytes. Far below a message's limit.
MESSAGE_BYTES = 1 << 18
# What a token takes beside its logprobs, and an output beside its tokens.
_TOKEN_BYTES, _OUTPUT_BYTES = 6, 64


@dataclass(slots=True, eq=False)
class Stream:
    """One sequence's output."""

    attempt: Attempt
    router_id: bytes
    slot: int
    generation: int
    first_number: int
    token_ids: list[int] = field(default_factory=list)
    # Where asked for, one a token; serialised, which takes a fifth of the memory.
    logprobs: list[bytes] = field(default_factory=list)
    finish: Finish = Finish.NONE
    ended_at: float | None = None
    # Watermark: how many of token_ids the router has been sent, and whether it has been sent the finish.
    sent: int = 0
    sent_finish: bool = False

    @property
    def has_news(self) -> bool:
        return self.sent < len(self.token_ids) or (self.finish is not Finish.NONE and not self.sent_finish)


@dataclass(slots=True, eq=False)
class _Router:
    following: int = 0  # grows with each Follow; only the newest is served
    is_open: bool = False
    # It gave this worker up: what still runs for it is to end.
    disowned: bool = False
    lost_at: float | None = None
    dirty: dict[AttemptKey, Stream] = field(default_factory=dict)


class Streams:
    """All streams of a worker, by attempt, by slot and by router."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_key: dict[AttemptKey, Stream] = {}
        self._by_slot: dict[tuple[int, int], Stream] = {}
        self._routers: dict[bytes, _Router] = {}

    @property
    def live(self) -> int:
        """Streams whose slot may still emit."""
        return len(self._by_slot)

    def reserve(
        self, attempt: Attempt, router_id: bytes, first_number: int, slot: int, generation: int
    ) -> None:
        """Registers a reservation; idempotent."""
        if AttemptKey.of(attempt) in self._by_key:
            return
        stream = Stream(attempt, router_id, slot, generation, first_number)
        self._by_key[AttemptKey.of(attempt)] = stream
        self._by_slot[slot, generation] = stream
        self._router(router_id)

    def emit(self, record: Record) -> list[int] | None:
        """Takes one word of the ring; where it was the slot's last, all the tokens that it emitted."""
        stream = self._by_slot.get((record.slot, record.generation))
        if stream is None:
            raise RuntimeError(f"slot {record.slot} emitted in unknown generation {record.generation}")
        if record.has_token:
            if record.logprobs is not None:
                stream.logprobs.append(logprobs_message(record.logprobs).SerializeToString())
            stream.token_ids.append(record.token)
        if record.finish is not Finish.NONE:
            self._finish(stream, record.finish)
        self._mark(stream)
        return None if record.finish is Finish.NONE else stream.token_ids

    def end_unused(self, attempt: Attempt) -> None:
        """A reservation ended before its slot was ever active."""
        stream = self._by_key.get(AttemptKey.of(attempt))
        if stream is not None and stream.finish is Finish.NONE:
            self._finish(stream, Finish.CANCELLED)
            self._mark(stream)

    def attach(self, attempt: Attempt, router_id: bytes, next_number: int) -> None:
        """Gives a stream to another router from `next_number` on. Raises BatonError NOT_FOUND or INVALID."""
        stream = self._by_key.get(AttemptKey.of(attempt))
        if stream is None:
            raise BatonError(ErrorKind.NOT_FOUND, "this worker has no such attempt")
        behind = next_number - stream.first_number
        if not 0 <= behind <= len(stream.token_ids):
            raise BatonError(ErrorKind.INVALID, f"token {next_number} is not among those emitted or next")
        self._router(stream.router_id).dirty.pop(AttemptKey.of(attempt), None)
        stream.router_id = router_id
        stream.sent, stream.sent_finish = behind, False
        self._mark(stream)

    def follow(
        self, router_id: bytes, positions: Iterable[Position] = (), former: Iterable[bytes] = ()
    ) -> tuple[int, list[Attempt]]:
        """Opens a router's stream. `positions`: from where on it wants which sequences; it gets any other of
        its own from its first number on. `former`: ids under which it wants nothing any more.

        Returns the stream's number, and the attempts of `positions` that are not here.
        """
        for one in former:
            self._disown(one)
        router = self._router(router_id)
        router.following += 1
        router.is_open, router.lost_at = True, None
        wanted = {AttemptKey.of(position.attempt): position for position in positions}
        for key, stream in self._by_key.items():
            if stream.router_id == router_id:
                position = wanted.pop(key, None)
                behind = 0 if position is None else position.next_number - stream.first_number
                # Prefill may have told it a token that is not here yet.
                stream.sent, stream.sent_finish = min(max(behind, 0), len(stream.token_ids)), False
                self._mark(stream)
        return router.following, [position.attempt for position in wanted.values()]

    def _disown(self, router_id: bytes) -> None:
        """Ends the stream of a router's former id, and with the next `sweep` what runs for it."""
        router = self._routers.get(router_id)
        if router is not None:
            router.following += 1
            router.is_open, router.disowned, router.lost_at = False, True, self._clock()

    def is_newest(self, router_id: bytes, following: int) -> bool:
        """Whether no later stream of that router was opened, and it still wants this one."""
        router = self._routers.get(router_id)
        return router is not None and router.following == following

    def unfollow(self, router_id: bytes, following: int) -> None:
        """A router's stream was closed; nothing if it was not the newest."""
        router = self._routers.get(router_id)
        if router is not None and router.following == following:
            router.is_open, router.lost_at = False, self._clock()

    def collect(self, router_id: bytes, step: int) -> FollowResponse | None:
        """What is beyond this router's watermarks, which move up: about `MESSAGE_BYTES` of it at most, the
        rest with the next call. None where there is nothing."""
        dirty = self._routers[router_id].dirty
        if not dirty:
            return None
        message, room = FollowResponse(step=step), MESSAGE_BYTES
        while dirty and room > 0:
            key = next(iter(dirty))
            stream = dirty.pop(key)
            room -= _add_output(message, stream, room)
            self._mark(stream)  # behind the others
        return message

    def sweep(self) -> list[Attempt]:
        """Drops what has lingered; returns the attempts to cancel because their router is gone."""
        now = self._clock()
        orphans = []
        for key, stream in list(self._by_key.items()):
            router = self._router(stream.router_id)
            lost_for = 0.0 if router.lost_at is None else now - router.lost_at
            if stream.ended_at is not None:
                if now - stream.ended_at > LINGER_S:
                    self._drop(key, stream)
            elif router.disowned or lost_for > (LINGER_S if stream.token_ids else TICKET_GRACE_S):
                orphans.append(stream.attempt)
        self._forget_idle_routers(now)
        return orphans

    def _finish(self, stream: Stream, finish: Finish) -> None:
        stream.finish = finish
        stream.ended_at = self._clock()
        self._by_slot.pop((stream.slot, stream.generation), None)

    def _mark(self, stream: Stream) -> None:
        if stream.has_news:
            self._router(stream.router_id).dirty[AttemptKey.of(stream.attempt)] = stream

    def _drop(self, key: AttemptKey, stream: Stream) -> None:
        del self._by_key[key]
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


def _add_output(message: FollowResponse, stream: Stream, room: int) -> int:
    """Adds what of the stream fits in about `room` bytes, one token at least; how many it takes."""
    until, taken = len(stream.token_ids), _OUTPUT_BYTES
    if stream.logprobs:
        for at in range(stream.sent, until):
            if taken >= room and at > stream.sent:
                until = at
                break
            taken += _TOKEN_BYTES + len(stream.logprobs[at])
    else:
        until = min(until, stream.sent + max(1, (room - taken) // _TOKEN_BYTES))
        taken += (until - stream.sent) * _TOKEN_BYTES
    output = message.outputs.add(
        attempt=stream.attempt,
        first_number=stream.first_number + stream.sent,
        token_ids=stream.token_ids[stream.sent : until],
        logprobs=map(types_pb2.Logprobs.FromString, stream.logprobs[stream.sent : until]),
    )
    stream.sent = until
    if until == len(stream.token_ids) and stream.finish is not Finish.NONE:
        output.finish_reason = FinishReason.ValueType(stream.finish.value)
        stream.sent_finish = True
    return taken
