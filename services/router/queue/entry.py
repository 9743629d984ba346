"""A request's entry in the waiting queue, which it keeps from attempt to attempt."""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import dataclass, field

from services.router.placement.fitting import FailedPair
from services.router.placement.room import Waits
from services.router.queue.block_wait import PlacedNumber
from services.router.request.limits import Needs
from services.router.request.request import ClientCall
from services.router.request.slo import Due, Slo
from services.router.workers.other_claims import FIRST, Precedence

_NOT_PLACED: PlacedNumber = sys.maxsize
# Turn of its call, and order of arrival: lower ones go first among those of one tenant and priority.
Position = tuple[float, int]


@dataclass(eq=False)
class QueueEntry:
    """One request. `tokens`: about what it takes of workers, in prompt tokens; `prompt`: its prompt's. Both
    are 0 until it waits."""

    call: ClientCall
    position: Position
    # When it arrived, on the event loop's clock.
    since: float = 0.0
    # Its limits, until it was placed first; and when its first token is due, on the same clock.
    slo: Slo | None = None
    first_token_by: float | None = None
    # From when on it is too late for its first token to be in time, on the same clock, and whether it is:
    # then it waits behind those of its tenant and priority that are not.
    late_at: float = math.inf
    late: bool = False
    # Until when it may wait behind others, and for room under TPOT limits.
    waits_until: float = 0.0
    # When its client's call ends in any case, on the same clock.
    deadline: float | None = None
    tokens: float = 0.0
    prompt: int = 0
    # What it asks of workers besides tokens (`Needs`), and where its attempts failed.
    logprobs: int | None = None
    output_format: str = ""
    failed: list[FailedPair] = field(default_factory=list)
    # Predicted seconds of its prompt on one worker; 0 where that is not needed.
    prefill_s: float = 0.0
    # Its number among the requests that were placed, in the order in which they were placed first.
    number: PlacedNumber = _NOT_PLACED

    def needs(self, computed: int, total: int) -> Needs:
        """Returns what an attempt of the request needs of workers."""
        return Needs(computed, total, self.logprobs, self.output_format)

    @property
    def returning(self) -> bool:
        """True if the request was placed before. The queue's bound and its order apply to its first wait
        only."""
        return self.number != _NOT_PLACED

    @property
    def precedence(self) -> Precedence:
        """The request's precedence over requests of sibling processes. A late one has none over others of its
        priority."""
        if self.returning:
            return FIRST
        since = max(self.since, self.call.placed_at)
        if self.call.tenant is not None:
            since = max(since, self.call.tenant.placed_at)
        return Precedence(self.call.priority, math.inf if self.late else since)

    @property
    def sort_key(self) -> tuple[bool, Position]:
        """The key by which requests of a tenant and priority are sorted: the one with the lowest is placed
        first."""
        return self.late, self.position

    def left_s(self) -> float | None:
        """Seconds until its first token is due; None without such a limit."""
        if self.first_token_by is None:
            return None
        return self.first_token_by - asyncio.get_running_loop().time()

    def due(self) -> Due | None:
        """The time at which the first token is due; None without such a limit."""
        left_s, slo = self.left_s(), self.slo
        if left_s is None:
            return None
        if slo is None or self.late or self.first_token_by == self.deadline:
            return Due(left_s)
        return Due(left_s, slo.ttft_s)

    def may_wait(self) -> bool:
        """True while the request has time to wait for room under TPOT limits."""
        return not self.returning and asyncio.get_running_loop().time() < self.waits_until

    def waits(self) -> Waits:
        """The reason for which the request waits although a decode worker has a free slot."""
        if not self.may_wait():
            return Waits.NOT
        return Waits.FOR_OTHERS if self.late else Waits.FOR_ITSELF

    @property
    def tpot_s(self) -> float | None:
        """The request's TPOT limit, in seconds; None without one."""
        return None if self.slo is None else self.slo.tpot_s

    @property
    def tenant(self) -> str:
        """The name of its tenant; empty without tenants."""
        return "" if self.call.tenant is None else self.call.tenant.name

    @property
    def weight(self) -> float:
        """The weight of its tenant; 1 without tenants."""
        return 1.0 if self.call.tenant is None else self.call.tenant.weight
