"""Four routers share the limits of a tenant: in virtual time, and with a real Valkey."""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from baton.base.errors import BatonError
from baton.state import State
from baton.state.embedded import EmbeddedServer
from baton.state.stores.protocols import Quotas
from services.router.tenants.account import CallCost, Permit, TenantAccount
from services.router.tenants.leased_bucket import REBALANCE_S
from services.router.tenants.leases import QuotaLeases
from services.router.tenants.tenants_file import TenantLimits
from services.router.tenants.token_bucket import TokenBucket
from tests.router.tenants.clock import Clock
from tests.state.memory_quotas import MemoryQuotas

ROUTERS = 4
TICK_S = 0.02
# The share of a limit that may be admitted beyond it, of what the limit would admit that may be refused.
OVER, UNDER = 0.10, 0.10


class Fleet:
    """Routers with one tenant, each rebalancing twice a second at a time of its own."""

    def __init__(self, quotas: Quotas, clock: Callable[[], float], **limits: int) -> None:
        self.accounts = [
            TenantAccount("acme", TenantLimits.model_validate(limits), clock) for _ in range(ROUTERS)
        ]
        self.leases = [
            QuotaLeases(quotas, lambda account=account: {"acme": account}, clock)  # type: ignore[misc]
            for account in self.accounts
        ]

    async def warm(self) -> None:
        """Lets time pass until leases are as after a few seconds without calls."""
        for _ in range(6):
            for account, leases in zip(self.accounts, self.leases, strict=True):
                account.touched = True
                await leases.rebalance()

    async def rebalance_due(self, tick: int) -> None:
        every = round(REBALANCE_S / TICK_S)
        for index, leases in enumerate(self.leases):
            if (tick + index * every // ROUTERS) % every == 0:
                await leases.rebalance()

    def admitted(self, router: int, cost: CallCost) -> bool:
        try:
            with self.accounts[router].admit(cost) as permit:
                permit.output_tokens = cost.output_tokens
        except BatonError:
            return False
        return True


Demand = Callable[[random.Random, float, int], bool]


def evenly(draw: random.Random, at_s: float, router: int) -> bool:
    return draw.random() < 0.25


def at_one(draw: random.Random, at_s: float, router: int) -> bool:
    return router == 2 and draw.random() < 0.9


def moving(draw: random.Random, at_s: float, router: int) -> bool:
    return router == at_s // 7 % ROUTERS and draw.random() < 0.9


def in_bursts(draw: random.Random, at_s: float, router: int) -> bool:
    return at_s % 60 > 50 and draw.random() < 0.9


@pytest.mark.parametrize(
    ("limit", "least", "most"), [(6, 1, 1), (600, 1, 1), (60_000, 100, 3000)], ids=["few", "many", "tokens"]
)
@pytest.mark.parametrize("demand", [evenly, at_one, moving, in_bursts])
async def test_four_routers_admit_what_one_would(limit: int, least: int, most: int, demand: Demand) -> None:
    """Never more than a tenth above the limit; nearly all that one bucket would admit, at every router that
    is asked."""
    clock, draw = Clock(), random.Random(7)
    fleet = Fleet(MemoryQuotas(clock), clock, prompt_tokens_per_minute=limit)
    alone = TokenBucket(limit, clock)
    await fleet.warm()
    seconds, total, would = 120, 0, 0
    by_router = [0] * ROUTERS
    began = clock.now
    for tick in range(round(seconds / TICK_S)):
        clock.now += TICK_S
        at_s = clock.now - began
        await fleet.rebalance_due(tick)
        for router in range(ROUTERS):
            if not demand(draw, at_s, router):
                continue
            amount = draw.randint(least, most)
            if fleet.admitted(router, CallCost(prompt_tokens=amount)):
                by_router[router] += amount
                total += amount
            if alone.wait_s(amount) == 0:
                alone.take(amount)
                would += amount
        # At any time; each router may go into debt by one call.
        assert total <= (1 + OVER) * would + OVER * limit + ROUTERS * most
    assert total <= (1 + OVER) * limit * (1 + seconds / 60)
    assert total >= (1 - UNDER) * would
    if demand is evenly:
        assert min(by_router) >= total / ROUTERS / 2


async def test_limits_hold_while_redis_is_away() -> None:
    """Each router then keeps to its part of the rate; what it used meanwhile is rebalanced afterwards."""
    clock, draw = Clock(), random.Random(7)
    quotas = MemoryQuotas(clock)
    fleet = Fleet(quotas, clock, requests_per_minute=600)
    await fleet.warm()
    began, total, away = clock.now, 0, 0
    for tick in range(round(240 / TICK_S)):
        clock.now += TICK_S
        at_s = clock.now - began
        quotas.unavailable = 60 <= at_s < 180
        await fleet.rebalance_due(tick)
        for router in range(ROUTERS):
            if draw.random() < 0.25 and fleet.admitted(router, CallCost()):
                total += 1
                away += quotas.unavailable
        assert total <= (1 + OVER) * 600 * (1 + at_s / 60)
    assert away >= 0.9 * 600 * 2
    assert total >= 0.95 * 600 * 5


@contextlib.contextmanager
def running(calls: list[AbstractContextManager[Permit]]) -> Iterator[None]:
    try:
        yield
    finally:
        for call in calls:
            call.__exit__(None, None, None)


async def test_concurrent_requests_of_four_routers() -> None:
    """The routers together never admit more than the limit, and a single one that asks gets all of it."""
    clock, draw = Clock(), random.Random(7)
    fleet = Fleet(MemoryQuotas(clock), clock, concurrent_requests=10)
    await fleet.warm()
    calls: dict[int, list[AbstractContextManager[Permit]]] = {router: [] for router in range(ROUTERS)}
    most = 0
    with contextlib.ExitStack() as stack:
        for held in calls.values():
            stack.enter_context(running(held))
        for tick in range(round(30 / TICK_S)):
            clock.now += TICK_S
            await fleet.rebalance_due(tick)
            router = draw.randrange(ROUTERS) if tick < 1000 else 1
            call = fleet.accounts[router].admit(CallCost())
            with contextlib.suppress(BatonError):
                call.__enter__()
                calls[router].append(call)
            together = sum(account.running for account in fleet.accounts)
            assert together <= 10
            most = max(most, together)
            ending = calls[draw.randrange(ROUTERS)]
            if ending and draw.random() < (0.3 if tick < 1000 else 0.05):
                ending.pop().__exit__(None, None, None)
    assert most == 10


async def test_a_router_that_comes_gets_its_part_before_it_is_ready() -> None:
    """Tenants without calls are included: the router that was alone gives up what it does not use."""
    clock = Clock()
    quotas = MemoryQuotas(clock)
    limits = TenantLimits(requests_per_minute=600, concurrent_requests=64)
    accounts = [TenantAccount("acme", limits, clock) for _ in range(2)]
    one, two = (
        QuotaLeases(quotas, lambda account=account: {"acme": account}, clock)  # type: ignore[misc]
        for account in accounts
    )
    for _ in range(4):
        await one.rebalance()
        clock.now += REBALANCE_S
    assert one.joined
    await two.rebalance()
    clock.now += REBALANCE_S
    while not two.joined:
        await one.rebalance()
        await two.rebalance()
        clock.now += REBALANCE_S
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(accounts[1].admit(CallCost()))


async def test_a_store_without_its_memory_shares_as_before() -> None:
    clock = Clock()
    store = MemoryQuotas(clock)
    fleet = Fleet(store, clock, requests_per_minute=600, concurrent_requests=64)
    await fleet.warm()
    store.wipe()
    for account, leases in zip(fleet.accounts, fleet.leases, strict=True):
        account.touched = True
        await leases.rebalance()
    for router in range(ROUTERS):
        assert fleet.admitted(router, CallCost())


async def test_with_a_real_store() -> None:
    """The same with the script of Redis: calls of four routers that all want more than there is."""
    server = await EmbeddedServer.start()
    state = State.at(server.url, namespace=uuid.uuid4().hex)
    try:
        fleet = Fleet(state.quotas, time.monotonic, requests_per_minute=1200)
        await fleet.warm()
        began, total, rounds = time.monotonic(), [0] * ROUTERS, 0
        # Twice as many calls as there may be are made on slow cores too.
        while (passed_s := time.monotonic() - began) < 0.6 or rounds < 12:
            rounds += 1
            for router in range(ROUTERS):
                total[router] += sum(fleet.admitted(router, CallCost()) for _ in range(50))
                await fleet.leases[router].rebalance()
        limit = 1200 * (1 + passed_s / 60)
        assert 0.9 * limit <= sum(total) <= 1.01 * limit + ROUTERS
        assert min(total) >= 0.1 * limit
        for leases in fleet.leases:
            await leases.close()
    finally:
        await state.close()
        await server.stop()


async def test_processes_without_redis_keep_to_their_parts() -> None:
    clock = Clock()
    account = TenantAccount("acme", TenantLimits(requests_per_minute=40, concurrent_requests=8), clock)
    leases = QuotaLeases(None, lambda: {"acme": account}, clock, routers=ROUTERS)
    await leases.rebalance()
    costs = [CallCost()] * 50
    admitted = 0
    for cost in costs:
        with contextlib.suppress(BatonError), account.admit(cost):
            admitted += 1
    assert admitted == 10
    clock.now += 12
    with account.admit(CallCost()), account.admit(CallCost()), pytest.raises(BatonError):
        account.check()
