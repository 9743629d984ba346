"""The order in which waiting requests are placed: by priority, then by tenant, then by call.

Tenants of one priority share by weighted start-time fair queueing (Goyal, Vin and Cheng, "Start-time fair
queueing: a scheduling algorithm for integrated services packet switching networks", IEEE/ACM Transactions on
Networking 5(5), 1997). The flows are the tenants, the cost of a request is about its share of the workers'
time, in prompt tokens. The flow with the least start tag is served next, and its tag grows by the request's
cost over the tenant's weight; the virtual time is the start tag of the flow served last. So in proportion to
weights no waiting tenant gets more than another, however many requests either sends, except for one request
of each; and what it had while none waited is not held against it.

A flow that begins to wait has as start tag where its last request ended, but no less than the virtual time
less a burst: as from a token bucket, a tenant may have at once what it did not use of its share lately. So
its requests that come together do not wait for a tenant that always sends too many.

A more urgent priority goes first, except for a floor: a share of what is placed while less urgent requests
wait is theirs, each priority in turn, so that none starves.

Within a flow, client calls take turns: each request of a call has the turn behind that of the one before, and
the first has the current turn. That grows by one over the number of calls that wait with each request that is
placed, as the virtual time of weighted fair queueing does (Demers, Keshav and Shenker, "Analysis and
simulation of a fair queueing algorithm", SIGCOMM 1989). So a call with a thousand choices and a later call
with one take turns, and the second choice of a call waits for a request of each call that waits with it. The
turn that was served last would not do in place of the current one: it stands still while ever new calls come,
and all further choices would starve, whereas tenants are few, and each is charged. Within a turn, first come,
first served. Requests that are too late for their first token go last, except for a part of what is placed.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from services.router.queue.entry import Position, QueueEntry
from services.router.request.request import ClientCall
from services.router.workers.backlog import NO_PROMPTS, SecondsByLength, length_of

# One part in this many of what is placed while less urgent requests wait is theirs.
_FLOOR_PARTS = 10
# One in this many of the requests placed while others of their flow are late is one of these.
_LATE_PARTS = 30
# What a tenant that used less than its share may have at once before it waits, in prompt tokens.
BURST_TOKENS = 65_536.0
# Number of flows up to which those without requests are kept, for their start tags.
MANY_FLOWS = 4096


class Ahead(NamedTuple):
    """Requests that will be placed before another: their number, their tokens, and the seconds of their
    prompts on one worker."""

    requests: int = 0
    tokens: float = 0.0
    prefill_s: float = 0.0


@dataclass(eq=False)
class _Flow:
    """One tenant's waiting requests of one priority, in their order."""

    start: float = 0.0
    weight: float = 1.0
    waiting: list[QueueEntry] = field(default_factory=list)
    # Sum of their costs, and of the seconds of their prompts.
    tokens: float = 0.0
    prefill_s: float = 0.0
    # The current turn, and how many requests of each call wait.
    turn: float = 0.0
    calls: Counter[ClientCall] = field(default_factory=Counter)
    # How many were placed while others were late, since one of those went first.
    before_late: int = 0


@dataclass(eq=False)
class _Priority:
    """The flows of one priority."""

    value: int
    time: float = 0.0
    flows: dict[str, _Flow] = field(default_factory=dict)
    # Those with waiting requests, by start tag.
    waiting: list[_Flow] = field(default_factory=list)
    # When its floor was served last, in turns of the floor.
    floor_turn: int = 0
    # When one of its requests was placed last, on the event loop's clock.
    placed_at: float = -math.inf

    def flow(self, tenant: str) -> _Flow:
        """The tenant's, made where there is none."""
        flow = self.flows.get(tenant)
        if flow is None:
            if len(self.flows) >= MANY_FLOWS:
                self._forget_flows()
            flow = self.flows[tenant] = _Flow()
        return flow

    def _forget_flows(self) -> None:
        """Forgets half of the flows that do not wait: those that owe least."""
        idle = [name for name, one in self.flows.items() if not one.waiting]
        for name in sorted(idle, key=lambda one: self.flows[one].start)[: -(-len(idle) // 2)]:
            del self.flows[name]

    def start_of(self, flow: _Flow) -> float:
        """The start tag of the flow's next request."""
        return max(self.time - BURST_TOKENS / flow.weight, flow.start)


class _Passed:
    """Numbers of requests of each flow, and of flows of each priority, that the current scan has skipped."""

    def __init__(self) -> None:
        self.requests: dict[_Flow, int] = {}
        self.flows: dict[_Priority, int] = {}

    def next_of(self, priority: _Priority) -> QueueEntry | None:
        """The next request of a priority."""
        index = self.flows.get(priority, 0)
        while index < len(priority.waiting):
            flow = priority.waiting[index]
            passed = self.requests.get(flow, 0)
            if passed < len(flow.waiting):
                return flow.waiting[passed]
            # A flow moves only to places behind this one, when one of its requests is placed.
            index = self.flows[priority] = index + 1
        return None


class RequestOrder:
    """The requests that wait for their first placement."""

    def __init__(self) -> None:
        self._priorities: dict[int, _Priority] = {}
        # Those with waiting requests, the most urgent first.
        self._waiting: list[_Priority] = []
        self._count = 0
        self._prompts = list(NO_PROMPTS)
        self._arrivals = 0
        # The cost of what was placed before less urgent requests, until they get their part of it; and how
        # often they got some.
        self._owed = 0.0
        self._floor_turns = 0
        self._passed = _Passed()

    def __len__(self) -> int:
        return self._count

    @property
    def flows(self) -> int:
        """Number of flows in which requests wait."""
        return sum(len(priority.waiting) for priority in self._waiting)

    @property
    def first(self) -> QueueEntry | None:
        """The first request of a scan."""
        return self._next(_Passed())

    def arrival(self, call: ClientCall) -> Position:
        """The position of a request that arrives now."""
        flow = self._priority(call.priority).flow("" if call.tenant is None else call.tenant.name)
        turn = max(flow.turn, call.next_turn)
        call.next_turn = turn + 1
        self._arrivals += 1
        return turn, self._arrivals

    def add(self, entry: QueueEntry) -> None:
        """Adds a request that begins to wait."""
        priority, flow = self._places(entry)
        bisect.insort(flow.waiting, entry, key=lambda one: one.sort_key)
        flow.weight = entry.weight
        flow.tokens += entry.tokens
        flow.prefill_s += entry.prefill_s
        flow.calls[entry.call] += 1
        self._prompts[length_of(entry.prefill_s)] += entry.prefill_s
        self._count += 1
        if len(flow.waiting) == 1:
            flow.start = priority.start_of(flow)
            if not priority.waiting:
                bisect.insort(self._waiting, priority, key=lambda one: one.value)
            bisect.insort(priority.waiting, flow, key=lambda one: one.start)

    def remove(self, entry: QueueEntry) -> None:
        """Removes a request that no longer waits."""
        self._remove(entry, *self._places(entry))

    def set_late(self, entry: QueueEntry, late: bool) -> None:
        """Moves a request that waits behind those of its flow that are not late, or back to its position."""
        flow = self._places(entry)[1]
        del flow.waiting[_index_of(entry, flow)]
        entry.late = late
        bisect.insort(flow.waiting, entry, key=lambda one: one.sort_key)

    def last_placed_at(self, priority: int) -> float:
        """Time at which a request of a priority was placed last."""
        return self._priority(priority).placed_at

    def placed(self, entry: QueueEntry, cost: float, now: float = -math.inf) -> None:
        """Removes a request that is placed, and charges its flow."""
        priority, flow = self._places(entry)
        priority.placed_at = now
        self._settle(priority, cost)
        priority.time = max(priority.time, flow.start)
        flow.turn += 1 / len(flow.calls)
        self._remove(entry, priority, flow)
        self._recall_late(flow)
        if flow.waiting:
            priority.waiting.remove(flow)
        flow.start += cost / flow.weight
        if flow.waiting:
            bisect.insort(priority.waiting, flow, key=lambda one: one.start)

    def walk(self) -> Iterator[QueueEntry]:
        """Yields the requests in order. Each may be placed or removed before the next is asked for, or is
        skipped. Only one scan at a time."""
        passed = self._passed = _Passed()
        while (entry := self._next(passed)) is not None:
            flow = self._places(entry)[1]
            index = passed.requests.get(flow, 0)
            yield entry
            if index < len(flow.waiting) and flow.waiting[index] is entry:
                passed.requests[flow] = max(index + 1, passed.requests.get(flow, 0))

    def pass_flow(self, entry: QueueEntry) -> None:
        """Makes the scan skip all requests that wait in this one's flow."""
        flow = self._places(entry)[1]
        self._passed.requests[flow] = len(flow.waiting)

    @property
    def prompts(self) -> SecondsByLength:
        """Seconds of all prompts, on one worker, as far as they were predicted."""
        return tuple(self._prompts)

    def ahead_of(self, entry: QueueEntry) -> Ahead:
        """Predicts what will be placed before a request that would wait from now on."""
        priority, own = self._places(entry)
        start = priority.start_of(own) + own.tokens / entry.weight
        count = tokens = prefill_s = 0.0
        for other in self._waiting:
            for flow in other.waiting:
                part = 1.0 if other.value < priority.value or flow is own else 0.0
                if other is priority and flow is not own:
                    part = min(1.0, max(0.0, start - flow.start) * flow.weight / max(1.0, flow.tokens))
                count += part * len(flow.waiting)
                tokens += part * flow.tokens
                prefill_s += part * flow.prefill_s
        return Ahead(round(count), tokens, prefill_s)

    def _recall_late(self, flow: _Flow) -> None:
        """Promotes the oldest late request once every `_LATE_PARTS` placements of its flow."""
        index = bisect.bisect_left(flow.waiting, True, key=lambda one: one.late)
        if index == len(flow.waiting):
            flow.before_late = 0
            return
        flow.before_late += 1
        if flow.before_late >= _LATE_PARTS - 1:
            flow.before_late = 0
            self.set_late(flow.waiting[index], False)

    def _next(self, passed: _Passed) -> QueueEntry | None:
        """The next request that was not passed over: of the most urgent priority, or of one to whose floor
        it is owed."""
        first: QueueEntry | None = None
        owed: tuple[int, QueueEntry] | None = None
        for priority in self._waiting:
            entry = passed.next_of(priority)
            if entry is None:
                continue
            if first is None:
                first = entry
                if not self._owed:
                    break
            elif owed is None or priority.floor_turn < owed[0]:
                owed = priority.floor_turn, entry
        is_due = owed is not None and (_FLOOR_PARTS - 1) * owed[1].tokens <= self._owed
        return owed[1] if owed is not None and is_due else first

    def _settle(self, priority: _Priority, cost: float) -> None:
        """Accounts for what less urgent requests are owed."""
        if len(self._waiting) == 1:
            self._owed = 0.0
        elif priority is self._waiting[0]:
            self._owed += cost
        else:
            self._owed = max(0.0, self._owed - (_FLOOR_PARTS - 1) * cost)
            self._floor_turns += 1
            priority.floor_turn = self._floor_turns

    def _places(self, entry: QueueEntry) -> tuple[_Priority, _Flow]:
        priority = self._priority(entry.call.priority)
        return priority, priority.flow(entry.tenant)

    def _priority(self, value: int) -> _Priority:
        priority = self._priorities.get(value)
        if priority is None:
            priority = self._priorities[value] = _Priority(value)
        return priority

    def _remove(self, entry: QueueEntry, priority: _Priority, flow: _Flow) -> None:
        del flow.waiting[_index_of(entry, flow)]
        flow.tokens -= entry.tokens
        flow.prefill_s -= entry.prefill_s
        flow.calls[entry.call] -= 1
        if not flow.calls[entry.call]:
            del flow.calls[entry.call]
        self._prompts[length_of(entry.prefill_s)] -= entry.prefill_s
        self._count -= 1
        if not self._count:
            self._prompts = list(NO_PROMPTS)
        if not flow.waiting:
            flow.tokens = flow.prefill_s = 0.0
            priority.waiting.remove(flow)
            if not priority.waiting:
                self._waiting.remove(priority)


def _index_of(entry: QueueEntry, flow: _Flow) -> int:
    index = bisect.bisect_left(flow.waiting, entry.sort_key, key=lambda one: one.sort_key)
    assert flow.waiting[index] is entry
    return index
