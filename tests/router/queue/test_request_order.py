"""The order of waiting requests: shares by weight, bursts, priorities with a floor, turns of calls."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.queue.entry import QueueEntry
from services.router.queue.request_order import BURST_TOKENS, MANY_FLOWS, RequestOrder
from services.router.request.request import ClientCall
from services.router.tenants.account import TenantAccount
from services.router.tenants.tenants_file import TenantLimits

COST = 1000.0


def tenant(name: str, weight: float = 1.0) -> TenantAccount:
    account = TenantAccount(name, TenantLimits(), lambda: 0.0)
    account.weight = weight
    return account


def wait(
    order: RequestOrder, who: TenantAccount | None, count: int = 1, priority: int = 0, cost: float = COST
) -> list[QueueEntry]:
    """Queues `count` client calls of one request each."""
    entries = []
    for _ in range(count):
        call = ClientCall(tenant=who, priority=priority)
        entry = QueueEntry(call, order.arrival(call), tokens=cost)
        order.add(entry)
        entries.append(entry)
    return entries


def place(order: RequestOrder) -> QueueEntry:
    """Places the next request and returns it."""
    entry = next(order.walk())
    order.placed(entry, entry.tokens)
    return entry


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(1, 5000)), min_size=2, max_size=4),
    st.randoms(use_true_random=False),
)
def test_shares_of_waiting_tenants_differ_by_less_than_a_request_of_each(
    flows: list[tuple[float, float]], draw: random.Random
) -> None:
    """Theorem 1 of the paper: over any time in which both wait, what two flows got over their weights differs
    by at most the largest request of each over its weight."""
    order = RequestOrder()
    tenants = [tenant(f"t{number}", weight) for number, (weight, _) in enumerate(flows)]
    for one, (_, most) in zip(tenants, flows, strict=True):
        for _ in range(20):
            wait(order, one, cost=draw.uniform(most / 10, most))
    left, got = Counter({one.name: 20 for one in tenants}), Counter[str]()
    while min(left.values()):
        entry = place(order)
        left[entry.tenant] -= 1
        got[entry.tenant] += entry.tokens  # type: ignore[assignment]
    shares = [got[one.name] / one.weight for one in tenants]
    bounds = [most / weight for weight, most in flows]
    for a in range(len(flows)):
        for b in range(a):
            assert abs(shares[a] - shares[b]) <= (bounds[a] + bounds[b]) * (1 + 1e-9)


def test_a_tenant_below_its_share_goes_first_but_only_for_a_burst() -> None:
    order, many, few = RequestOrder(), tenant("many"), tenant("few", weight=2.0)
    wait(order, many, 400)
    for _ in range(200):
        place(order)
    wait(order, few, 200)
    names = [place(order).tenant for _ in range(150)]
    burst = names.index("many")
    assert burst == pytest.approx(BURST_TOKENS / COST, abs=3)
    rest = Counter(names[burst:])
    assert rest["few"] == pytest.approx(2 * rest["many"], abs=3)


def test_what_a_tenant_had_while_nobody_waited_is_not_held_against_it() -> None:
    order, first, second = RequestOrder(), tenant("first"), tenant("second")
    for _ in range(1000):
        wait(order, first)
        place(order)
    wait(order, second, 200)
    wait(order, first, 200)
    for _ in range(int(BURST_TOKENS / COST) + 3):  # the second one's burst
        place(order)
    assert Counter(place(order).tenant for _ in range(40)) == {"first": 20, "second": 20}


def test_a_tenant_that_ends_its_wait_pays_for_what_it_had() -> None:
    """The tenant may not start afresh by waiting with one request at a time."""
    order, patient, sly = RequestOrder(), tenant("patient"), tenant("sly")
    wait(order, patient, 600)
    got, last = Counter[str](), "sly"
    for _ in range(400):
        if last == "sly":
            wait(order, sly)
        last = place(order).tenant
        got[last] += 1
    assert abs(got["sly"] - got["patient"]) <= 2 + BURST_TOKENS / COST


def test_more_urgent_requests_go_first_and_less_urgent_ones_have_a_floor() -> None:
    order = RequestOrder()
    wait(order, None, 50, priority=3)
    wait(order, None, 50, priority=1)
    wait(order, None, 2000, priority=0)
    placed = [place(order).call.priority for _ in range(600)]
    assert placed[:9] == [0] * 9
    assert Counter(placed) == {0: 540, 1: 30, 3: 30}
    assert max(Counter(placed[at : at + 20])[0] for at in range(0, 600, 20)) <= 19, "evenly"


def test_the_floor_counts_costs_not_requests() -> None:
    order = RequestOrder()
    wait(order, None, 50, priority=5, cost=10 * COST)
    wait(order, None, 2000)
    placed = [place(order).call.priority for _ in range(910)]
    assert Counter(placed) == {0: 900, 5: 10}


def test_nobody_is_owed_for_what_was_placed_while_it_did_not_wait() -> None:
    order = RequestOrder()
    wait(order, None, 500)
    for _ in range(400):
        place(order)
    wait(order, None, 50, priority=1)
    assert [place(order).call.priority for _ in range(9)] == [0] * 9


def test_tenants_share_within_a_priority_only() -> None:
    order, a, b = RequestOrder(), tenant("a"), tenant("b")
    wait(order, a, 100)
    wait(order, b, 100, priority=1)
    wait(order, a, 100, priority=1)
    placed = [place(order) for _ in range(300)]
    later = [entry.tenant for entry in placed if entry.call.priority == 1]
    assert [entry.call.priority for entry in placed[:100]].count(0) >= 90
    assert Counter(later[:50]) == {"a": 25, "b": 25}


def test_requests_that_are_passed_over_keep_their_places() -> None:
    """The requests need a pool without room, and others behind them another one."""
    order, a, b = RequestOrder(), tenant("a"), tenant("b")
    for who, priority in ((a, 0), (b, 0), (a, 2)):
        wait(order, who, 10, priority)
    walked = list(order.walk())
    assert len(walked) == len(set(map(id, walked))) == len(order) == 30
    assert [entry.call.priority for entry in walked] == [0] * 20 + [2] * 10
    every_third = [entry for number, entry in enumerate(order.walk()) if number % 3 == 2]
    seen = []
    for entry in order.walk():
        seen.append(entry)
        if entry in every_third:
            order.placed(entry, COST)
    assert len(seen) == len(set(map(id, seen))) == 30
    left = list(order.walk())
    assert len(left) == len(order) == 20
    assert not set(map(id, left)) & set(map(id, every_third))
    order.pass_flow(first := next(walk := order.walk()))
    assert (first.tenant, first.call.priority) not in {(one.tenant, one.call.priority) for one in walk}


def test_calls_of_a_tenant_take_turns() -> None:
    order, one = RequestOrder(), tenant("one")
    large = ClientCall(tenant=one)
    for _ in range(50):
        order.add(QueueEntry(large, order.arrival(large), tokens=COST))
    for _ in range(10):
        place(order)
    small = wait(order, one)[0]
    assert small in [place(order) for _ in range(2)]


def test_how_many_requests_are_ahead() -> None:
    order, a, b = RequestOrder(), tenant("a"), tenant("b")
    for entry in wait(order, a, 100):
        order.remove(entry)
        entry.prefill_s = 0.5
        order.add(entry)
    mine = wait(order, b, 9)[0]
    order.remove(mine)

    def ahead(entry: QueueEntry) -> tuple[int, float]:
        found = order.ahead_of(entry)
        assert found.tokens == found.requests * COST
        return found.requests, found.prefill_s

    assert ahead(mine) == (16, 4.0), "8 of its own and as many of the other's"
    urgent, later = (ClientCall(tenant=b, priority=priority) for priority in (-1, 1))
    assert ahead(QueueEntry(urgent, order.arrival(urgent))) == (0, 0.0)
    assert ahead(QueueEntry(later, order.arrival(later))) == (108, 50.0)


def test_flows_without_requests_do_not_pile_up() -> None:
    def taken(tenants: int) -> int:
        """Bytes that an order takes after a request of each of many tenants."""
        tracemalloc.start()
        order = RequestOrder()
        for number in range(tenants):
            wait(order, tenant(f"t{number}"), cost=BURST_TOKENS)
            place(order)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size

    assert taken(4 * MANY_FLOWS) < 1.5 * taken(MANY_FLOWS)


def test_late_requests_go_last_in_their_flow_alone() -> None:
    order = RequestOrder()
    a, b = tenant("a"), tenant("b")
    first, second, third = wait(order, a, 3)
    (other,) = wait(order, b)
    order.set_late(first, True)
    order.set_late(second, True)
    assert [*order.walk()] == [third, first, second, other]
    order.set_late(second, False)
    assert [*order.walk()] == [second, third, first, other]
    order.remove(first)
    assert place(order) is second
    assert sorted(map(id, order.walk())) == sorted(map(id, (third, other)))
    (fourth,) = wait(order, a)
    order.set_late(third, True)
    assert [one for one in order.walk() if one is not other] == [fourth, third]


def test_one_of_thirty_that_are_placed_is_the_oldest_late_one() -> None:
    """The scan is a single one, which skips some."""
    order = RequestOrder()
    late = wait(order, None, 3)
    others = wait(order, None, 70)
    for entry in late:
        order.set_late(entry, True)
    stuck, placed = others[:5], []
    for entry in order.walk():
        if entry not in stuck:
            order.placed(entry, COST)
            placed.append(entry)
    assert placed[:29] == others[5:34]
    # Those moved in front of what the walk has passed over are for the next one.
    assert [*order.walk()] == [late[0], late[1], *stuck]
    assert placed[29:] == [*others[34:], late[2]]
    order.placed(late[0], COST)
    assert next(order.walk()) is late[1]
