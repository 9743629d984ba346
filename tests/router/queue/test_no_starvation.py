"""No request waits without end while others that came later are placed, whatever comes: the order of random
arrivals against a plain statement of its rules, and calls of several outputs among ever new ones."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from services.router.queue import request_order
from services.router.queue.entry import QueueEntry
from services.router.queue.request_order import BURST_TOKENS, RequestOrder
from services.router.request.request import ClientCall
from services.router.tenants.account import TenantAccount
from tests.router.conftest import SiteMaker, ids_request
from tests.router.queue.test_request_order import COST, place, tenant

LOOPING = 64


def calls(order: RequestOrder, outputs: int) -> list[QueueEntry]:
    """The entries of a call of `outputs` outputs, which begin to wait."""
    call = ClientCall()
    entries = [QueueEntry(call, order.arrival(call), tokens=COST) for _ in range(outputs)]
    for entry in entries:
        order.add(entry)
    return entries


@pytest.mark.parametrize("outputs", [2, 4, 8])
@pytest.mark.parametrize("slots", [1, 8, 60])
def test_outputs_of_a_call_are_placed_among_ever_new_calls(outputs: int, slots: int) -> None:
    """Each client begins another call when its one has ended, so that the queue is never empty: a call of n
    outputs has them all after twice as many placements as n calls one after another would wait for."""
    order, running = RequestOrder(), deque[QueueEntry]()
    for _ in range(LOOPING):
        calls(order, 1)
    mine: list[QueueEntry] = []
    left: set[QueueEntry] = set()
    for placed in range(20 * LOOPING + 2 * outputs * LOOPING):
        if placed == 20 * LOOPING:
            mine = calls(order, outputs)
            left = set(mine)
        running.append(place(order))
        left.discard(running[-1])
        if mine and not left:
            return
        if len(running) >= slots and running.popleft() not in mine:
            calls(order, 1)
    raise AssertionError("some outputs still wait")


@pytest.mark.parametrize("outputs", [4, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 8))])
async def test_a_call_of_several_outputs_ends_beside_looping_calls(site: SiteMaker, outputs: int) -> None:
    """The call takes at most twice the time of as many calls one after another, counted in calls of others
    that end meanwhile."""
    clients, ended = 12, 0
    async with site(slots=2, prefill_ahead_tokens=16) as here:
        here.worker("decode-0").behaviour.step_s = 0.0

        async def loop(number: int) -> None:
            nonlocal ended
            while True:
                await here.generate(ids_request([number, 2, 3], 2), timeout=60)
                ended += 1

        looping = [asyncio.create_task(loop(number)) for number in range(clients)]
        try:
            while ended < clients:  # noqa: ASYNC110 (the loops count)
                await asyncio.sleep(0.001)
            before = ended
            await here.generate(ids_request([99, 2, 3], 2, n=outputs), timeout=60)
            assert ended - before <= 2 * outputs * clients
        finally:
            for task in looping:
                task.cancel()
            await asyncio.gather(*looping, return_exceptions=True)


@dataclass
class Flow:
    """State of one tenant's requests of one priority, by the rules."""

    start: float = 0.0
    turn: float = 0.0
    before_late: int = 0


@dataclass
class Waiting:
    """One request: where it stands by the rules, and what was placed before it that came later."""

    entry: QueueEntry
    number: int
    turn: float
    # The current turn and its flow's other calls when it came; the most calls that waited with it since.
    came_at: float
    most_calls: int
    late: bool = False
    was_late: bool = False
    overtaken_in_flow: int = 0
    overtaken: int = 0


@dataclass
class Rules:
    """The documented order, said as plainly as possible: everything is looked for among all that wait."""

    waiting: dict[QueueEntry, Waiting] = field(default_factory=dict)
    flows: defaultdict[tuple[int, str], Flow] = field(default_factory=lambda: defaultdict(Flow))
    time: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    floors: Counter[int] = field(default_factory=Counter)
    owed: float = 0.0
    served_floors: int = 0
    turns: dict[ClientCall, float] = field(default_factory=dict)
    longest: Counter[str] = field(default_factory=Counter)

    def key(self, entry: QueueEntry) -> tuple[int, str]:
        return entry.call.priority, entry.tenant

    def of_flow(self, key: tuple[int, str]) -> list[Waiting]:
        return [one for one in self.waiting.values() if self.key(one.entry) == key]

    def came(self, entries: list[QueueEntry], number: int) -> None:
        """The outputs of a call."""
        key = self.key(entries[0])
        flow, others = self.flows[key], self.of_flow(key)
        if not others:
            credit = BURST_TOKENS / entries[0].weight
            flow.start = max(flow.start, self.time[key[0]] - credit)
        for entry in entries:
            turn = max(flow.turn, self.turns.get(entry.call, 0.0))
            self.turns[entry.call] = turn + 1
            self.waiting[entry] = Waiting(entry, number, turn, flow.turn, 0)
        self._count_calls(key)

    def _count_calls(self, key: tuple[int, str]) -> int:
        flow = self.of_flow(key)
        count = len({one.entry.call for one in flow})
        for one in flow:
            one.most_calls = max(one.most_calls, count)
        return count

    def priorities(self) -> set[int]:
        """The priority of the next request; two where tenants are equal."""
        waiting = sorted({one.entry.call.priority for one in self.waiting.values()})
        behind = waiting[1:]
        if not behind or not self.owed:
            return {waiting[0]}
        due = min(behind, key=lambda one: self.floors[one])
        return {due if 9 * one.tokens <= self.owed else waiting[0] for one in self.firsts(due)}

    def firsts(self, priority: int) -> list[QueueEntry]:
        """The requests of a priority that may be next: of each tenant with the least start tag its first."""
        keys = {self.key(entry) for entry in self.waiting if entry.call.priority == priority}
        least = min(self.flows[key].start for key in keys)
        found = []
        for key in sorted(keys):
            if self.flows[key].start <= least + 1e-6:
                first = min(self.of_flow(key), key=lambda one: (one.late, one.turn, one.entry.position[1]))
                found.append(first.entry)
        return found

    def placed(self, entry: QueueEntry) -> None:
        """Is placed, and charged for."""
        priority, key = entry.call.priority, self.key(entry)
        flow, mine = self.flows[key], self.waiting[entry]
        waiting = sorted({one.call.priority for one in self.waiting})
        if len(waiting) == 1:
            self.owed = 0.0
        elif priority == waiting[0]:
            self.owed += entry.tokens
        else:
            self.owed = max(0.0, self.owed - 9 * entry.tokens)
            self.served_floors += 1
            self.floors[priority] = self.served_floors
        self.time[priority] = max(self.time[priority], flow.start)
        flow.turn += 1 / self._count_calls(key)
        del self.waiting[entry]
        late = [one for one in self.of_flow(key) if one.late]
        flow.before_late = flow.before_late + 1 if late else 0
        if flow.before_late >= 29:
            flow.before_late = 0
            min(late, key=lambda one: (one.turn, one.entry.position[1])).late = False
        flow.start += entry.tokens / entry.weight
        for one in self.waiting.values():
            if one.number < mine.number:
                one.overtaken += 1
                one.overtaken_in_flow += self.key(one.entry) == key
        self.longest["any"] = max(self.longest["any"], mine.overtaken)
        if not mine.was_late:
            ahead = mine.turn - mine.came_at + 1
            assert mine.overtaken_in_flow <= ahead * mine.most_calls + 30, "it starves in its flow"


def arrivals(draw: random.Random, tenants: list[TenantAccount | None]) -> Iterator[list[float]]:
    """The costs of the outputs of ever new calls: mostly small, some large, some of many outputs."""
    while True:
        outputs = draw.choice((1, 1, 1, 1, 1, 2, 4, 8, 40))
        yield [draw.choice((50.0, 500.0, 500.0, 4000.0, 60_000.0))] * outputs


@pytest.mark.parametrize(("count", "seed"), [(200, 0), pytest.param(10_000, 1, marks=pytest.mark.slow)])
def test_random_arrivals_are_placed_by_the_rules_and_none_starves(count: int, seed: int) -> None:
    """Tenants of several weights, priorities, calls of several outputs, sizes, late requests, and clients
    that leave; the queue is rarely empty."""
    draw, order, rules = random.Random(seed), RequestOrder(), Rules()
    tenants = [None, *(tenant(f"t{number}", weight) for number, weight in enumerate((1.0, 2.0, 0.3)))]
    sizes, arrived = arrivals(draw, tenants), 0
    while arrived < count or rules.waiting:
        if arrived < count and (len(rules.waiting) < 60 or draw.random() < 0.3) and len(rules.waiting) < 150:
            call = ClientCall(tenant=draw.choice(tenants), priority=draw.choice((0, 0, 0, 1, 5)))
            entries = [QueueEntry(call, order.arrival(call), tokens=cost) for cost in next(sizes)]
            for entry in entries:
                order.add(entry)
            rules.came(entries, arrived)
            arrived += 1
        elif rules.waiting and draw.random() < 0.03:
            entry = draw.choice(list(rules.waiting))
            late = not rules.waiting[entry].late
            order.set_late(entry, late)
            rules.waiting[entry].late = late
            rules.waiting[entry].was_late = True
        elif rules.waiting and draw.random() < 0.02:
            entry = draw.choice(list(rules.waiting))
            order.remove(entry)
            del rules.waiting[entry]
        elif rules.waiting:
            entry = next(order.walk())
            assert entry.call.priority in rules.priorities()
            assert entry in rules.firsts(entry.call.priority)
            order.placed(entry, entry.tokens)
            rules.placed(entry)
    assert len(order) == 0
    print("placed before one that came earlier, at most:", rules.longest["any"])


def test_many_tenants_do_not_make_a_waiting_one_lose_its_place() -> None:
    """Flows are forgotten beyond a number, but none that waits."""
    order, first = RequestOrder(), tenant("first")
    call = ClientCall(tenant=first)
    entry = QueueEntry(call, order.arrival(call), tokens=COST)
    order.add(entry)
    for number in range(request_order.MANY_FLOWS + 10):
        other = ClientCall(tenant=tenant(f"t{number}"))
        waiting = QueueEntry(other, order.arrival(other), tokens=COST)
        order.add(waiting)
        order.placed(waiting, COST)
    assert next(order.walk()) is entry
