"""What counts as room at a decode worker for one request.

A free slot; for one that waits under a limit of the time per output token also that its own limit is met
there, or, where it is late, the limits of others. While it waits for itself, a worker that would compute much
more of its prompt than the one with most of it cached must have room for a quarter more than runs there: else
that takes time that sequences need, more of them wait, and are moved away from their caches in turn. Where
requests that are to be placed before it wait in sibling processes of the router, there must be room for one
more of each.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from services.router.placement.forecast import keeps_others_in_time, meets_alone, sequences_within
from services.router.workers.other_claims import Precedence
from services.router.workers.worker import Worker

MayUse = Callable[[Worker], bool]

# Where the worker that decodes computes the prompt, too: with how many uncached tokens it counts as having
# the prompt cached, as a factor of the fewest at any worker, plus a constant.
_UNCACHED_FACTOR, _UNCACHED_TOKENS = 1.5, 128


class Waits(Enum):
    """What keeps a request from a decode worker that has a free slot: nothing, that it would miss its own
    limit of the time per output token there, or, since it is late, that others would miss theirs."""

    NOT = auto()
    FOR_ITSELF = auto()
    FOR_OTHERS = auto()


@dataclass(frozen=True, slots=True)
class Room:
    """Of a request that has `context` tokens on average. `may_use`: whether it may use a worker with a free
    slot. `uncached`: the tokens of its prompt that each worker would compute that decodes it then; empty
    where it does not wait for a worker that has it cached."""

    may_use: MayUse
    waits: Waits
    tpot_s: float | None
    context: int
    precedence: Precedence
    uncached: Mapping[Worker, int]

    def at(self, decode: Worker) -> bool:
        """Whether a worker has room for the request."""
        if not self.within_limits(decode):
            return False
        return self._has_cached(decode) or self.within_limits(decode, decode.used_slots // 4 + 1)

    def within_limits(self, decode: Worker, more: int = 0) -> bool:
        """The same, whatever of its prompt the worker would have to compute; with `more`, whether there is
        room for so many further ones, too."""
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

    def _has_cached(self, decode: Worker) -> bool:
        tokens = self.uncached.get(decode)
        if tokens is None:
            return True
        least = min((tokens for worker, tokens in self.uncached.items() if worker.alive), default=0)
        return tokens <= _UNCACHED_FACTOR * least + _UNCACHED_TOKENS


def worth_waiting(workers: Iterable[Worker], tpot_s: float, context: int) -> bool:
    """Whether a request waits for room under its limit: some decode worker would meet it, and all that run
    have limits as tight. Sequences with looser ones would take the room of those that wait."""
    decodes = [worker for worker in workers if worker.decodes]
    as_tight = all(bisect.bisect_right(one.tpot_limits, tpot_s) == one.claimed_slots for one in decodes)
    return as_tight and any(meets_alone(one, tpot_s, context) for one in decodes)
