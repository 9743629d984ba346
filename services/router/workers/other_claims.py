"""Claims of others than this router process on a worker: its sibling processes, which report them, and other
routers, of which heartbeats show the sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from baton.v1.worker_pb2 import Load
from services.router.workers.backlog import NO_BACKLOG, BacklogPart


class Precedence(NamedTuple):
    """Compares requests that wait in sibling processes: the least is placed first. By priority, then by when
    a request arrived, or when another one of its call or tenant was placed since, in monotonic seconds: so
    calls and tenants take turns across processes, too."""

    priority: int
    since: float


# The precedence of a request that was placed before.
FIRST = Precedence(-(2**31), -math.inf)


@dataclass(frozen=True, slots=True)
class SiblingCounts:
    """Claims of a router's sibling processes on one worker, by their own counters (`router.processes`).

    `processes`: how many there are. `waiting`: of each in which requests wait for workers, the precedence of
    the first that is not late. `prefill_share`: see `PrefillShare`; `released_per_second`: see `Turnover`.
    """

    processes: int = 0
    slots: int = 0
    context: int = 0
    queued_tokens: int = 0
    queued_prompts: int = 0
    backlog: BacklogPart = NO_BACKLOG
    prefill_share: float = 0.0
    released_per_second: float = 0.0
    waiting: tuple[Precedence, ...] = ()

    def waiting_before(self, precedence: Precedence) -> int:
        """Number of sibling processes in which a request waits that is to be placed before."""
        return sum(first < precedence for first in self.waiting)


class OtherClaims:
    """Slots that others use at one worker, and the tokens in them."""

    def __init__(self) -> None:
        self.siblings = SiblingCounts()
        # The most slots that siblings had since the last poll was sent.
        self._sibling_peak = 0
        # Of other routers, by the last heartbeat.
        self.other_router_slots = 0
        self._other_router_before = 0
        self._other_router_context = 0

    @property
    def slots(self) -> int:
        """Number of slots that others use."""
        return self.siblings.slots + self.other_router_slots

    @property
    def context(self) -> int:
        """Tokens of the sequences in them."""
        return self.siblings.context + self._other_router_context

    def poll_sent(self) -> None:
        """Records that a poll is sent: its answer may count what siblings have at any time from now on."""
        self._sibling_peak = self.siblings.slots

    def set_siblings(self, counts: SiblingCounts) -> None:
        """Takes the claims of sibling processes."""
        self.siblings = counts
        self._sibling_peak = max(self._sibling_peak, counts.slots)

    def update(self, load: Load, claimed: int) -> None:
        """Takes the answer to a poll. `claimed`: the most slots of this process since the poll was sent."""
        used = load.slots - load.free_slots
        other_routers = max(0, used - claimed - max(self._sibling_peak, self.siblings.slots))
        # What siblings report may arrive after the answer to a poll: such slots count as those of other
        # routers in one poll only.
        self.other_router_slots = (
            min(other_routers, self._other_router_before) if self.siblings.processes else other_routers
        )
        self._other_router_before = other_routers
        self._other_router_context = load.context_tokens * self.other_router_slots // max(1, used)
