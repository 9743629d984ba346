"""Judges whether a decode worker has room for one request.

Room is a free slot; for a request that waits under a TPOT limit also that its own limit is met there, or,
where it is late, the limits of others. Where requests that are to be placed before it wait in sibling
processes of the router, there must be room for one more of each.

A combined worker that would compute much more of the prompt than the one with most of it cached must have
more room than that. A request that waits for its own limit uses it only where a quarter more sequences than
run there have room, too: else the prompt takes time that sequences need, more of them wait, and are moved
away from their caches in turn. And any request uses it only while few prompt tokens are queued there, if the
worker that has it cached has a free slot and soon has room for the prompt: else a full prompt queue at one
worker sends conversations to the next, which must compute several times as many tokens and is full, too.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

from services.router.placement.forecast import keeps_others_in_time, meets_alone, sequences_within
from services.router.workers.other_claims import Precedence
from services.router.workers.worker import Worker

MayUse = Callable[[Worker], bool]

# Where the worker that decodes computes the prompt, too: with how many uncached tokens it counts as having
# the prompt cached, as a factor of the fewest at any worker, plus a constant.
_UNCACHED_FACTOR, _UNCACHED_TOKENS = 1.5, 128
# Where it has less of the prompt cached: the share of the tokens that may be queued at a worker below which
# it has much room for prompts.
_MUCH_ROOM_SHARE = 0.25
# No request waits for a cache whose worker needs longer than this, by prediction, for its prompts.
_SOON_S = 0.25
# Nor for any worker that is so much later with them than predicted that it may have stopped to compute any.
STUCK_S = 1.0


class Waits(Enum):
    """The reason for keeping a request from a decode worker that has a free slot: none, that it would miss
    its own TPOT limit there, or, since it is late, that others would miss theirs."""

    NOT = auto()
    FOR_ITSELF = auto()
    FOR_OTHERS = auto()


@dataclass(frozen=True)
class Room:
    """The room for a request that has `context` tokens on average. `may_use`: whether it may use a worker
    with a free slot. `uncached`: the tokens of its prompt that each worker would compute that decodes it
    then; empty where it waits for no worker that has it cached. `ahead`: prompt tokens from which on a
    worker's queue is full."""

    may_use: MayUse
    waits: Waits
    tpot_s: float | None
    context: int
    precedence: Precedence
    uncached: Mapping[Worker, int]
    ahead: int

    def within_limits(self, decode: Worker, more: int = 0) -> bool:
        """True if a worker has room for the request, whatever of its prompt it would have to compute, and for
        `more` further ones like it."""
        if not (decode.decodes and decode.has_free_slot):
            return False
        left = decode.slots_left_by(self.precedence)
        if decode.free_slots <= left or not self.may_use(decode):
            return False
        match self.waits:
            case Waits.FOR_ITSELF:
                return sequences_within(decode, self.tpot_s, self.context) > left + more
            case Waits.FOR_OTHERS:
                return keeps_others_in_time(decode, self.context, 1 + left)
        return True

    def passes_over(self, decode: Worker) -> bool:
        """True if the request waits for a worker that has more of its prompt cached than this one, where it
        is within limits."""
        busy = decode.prefill_queue_tokens >= _MUCH_ROOM_SHARE * self.ahead
        if busy and self._computes_much(decode, self._fewest_with_room):
            return True
        if self.waits is not Waits.FOR_ITSELF or not self._computes_much(decode, self._fewest_alive):
            return False
        return not self.within_limits(decode, decode.used_slots // 4 + 1)

    def _computes_much(self, decode: Worker, fewest: float) -> bool:
        return self.uncached.get(decode, 0) > _UNCACHED_FACTOR * fewest + _UNCACHED_TOKENS

    @cached_property
    def _fewest_alive(self) -> float:
        """Uncached tokens at the worker with fewest of them, whether or not it has room."""
        return min((tokens for worker, tokens in self.uncached.items() if worker.alive), default=math.inf)

    @cached_property
    def _fewest_with_room(self) -> float:
        """The same of those that have room for the sequence, and for its prompt now or soon."""
        return min(
            (tokens for worker, tokens in self.uncached.items() if self._soon_has_room(worker)),
            default=math.inf,
        )

    def _soon_has_room(self, worker: Worker) -> bool:
        """False while the worker's step costs are not known, since nothing says when it will have."""
        known = worker.costs.prefill_token_s > 0
        moves = worker.backlog.wait_s < _SOON_S and worker.backlog.overdue_s < STUCK_S
        return known and moves and self.within_limits(worker)


def worth_waiting(workers: Iterable[Worker], tpot_s: float, context: int) -> bool:
    """True if a request should wait for room under its limit: some decode worker would meet it, and all that
    run have limits as tight. Sequences with looser ones would take the room of those that wait."""
    decodes = [worker for worker in workers if worker.decodes]
    as_tight = all(bisect.bisect_right(one.tpot_limits, tpot_s) == one.claimed_slots for one in decodes)
    return as_tight and any(meets_alone(one, tpot_s, context) for one in decodes)
