"""What others than this router process have at a worker: its sibling processes, which report it, and other
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


# Of a request that was placed before.
FIRST = Precedence(-(2**31), -math.inf)


@dataclass(frozen=True, slots=True)
class SiblingCounts:
    """What the sibling processes of a router have at one worker, by their own counters (`router.processes`).

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
        """In how many of them a request waits that is to be placed before."""
        return sum(first < precedence for first in self.waiting)


class OtherClaims:
    """Slots that others use at one worker, and the tokens in them."""

    def __init__(self) -> None:
        self.siblings = SiblingCounts()
        # The most slots that siblings had since the last poll was sent.
        self._sibling_peak = 0
        # Of other routers, by the last heartbeat.
        self.foreign_slots = 0
        self._foreign_before = 0
        self._foreign_context = 0

    @property
    def slots(self) -> int:
        """Slots that others use."""
        return self.siblings.slots + self.foreign_slots

    @property
    def context(self) -> int:
        """Tokens of the sequences in them."""
        return self.siblings.context + self._foreign_context

    def poll_sent(self) -> None:
        """The answer to the poll that is sent now may count what siblings have at any time from now on."""
        self._sibling_peak = self.siblings.slots

    def set_siblings(self, counts: SiblingCounts) -> None:
        """Takes what sibling processes have."""
        self.siblings = counts
        self._sibling_peak = max(self._sibling_peak, counts.slots)

    def update(self, load: Load, claimed: int) -> None:
        """Takes the answer to a poll. `claimed`: the most slots of this process since the poll was sent."""
        used = load.slots - load.free_slots
        foreign = max(0, used - claimed - max(self._sibling_peak, self.siblings.slots))
        # What siblings report may arrive after the answer to a poll: such slots are foreign in one poll only.
        self.foreign_slots = min(foreign, self._foreign_before) if self.siblings.processes else foreign
        self._foreign_before = foreign
        self._foreign_context = load.context_tokens * self.foreign_slots // max(1, used)
