"""Leases of tenants' limits: in Redis, and in the memory of other tests."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator

import pytest

from baton.base.errors import BatonError
from baton.state.stores.protocols import MAX_REBALANCED, Quotas
from baton.state.stores.records import BucketAsk, QuotaAsk, SlotAsk
from tests.state.memory_quotas import MemoryQuotas
from tests.state.opened import open_state


@pytest.fixture(params=["memory", "redis", "cluster"])
def url(request: pytest.FixtureRequest) -> str | None:
    """The URL of the store; None in memory."""
    if request.param == "memory":
        return None
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture
async def quotas(url: str | None) -> AsyncIterator[Quotas]:
    if url is None:
        yield MemoryQuotas(time.monotonic)
        return
    state = await open_state(url, namespace=uuid.uuid4().hex)
    yield state.quotas
    await state.close()


class Router:
    """One router's lease of one limit."""

    def __init__(self, quotas: Quotas, name: str, limit: int = 60_000) -> None:
        self._quotas = quotas
        self._name = name
        self.limit = limit
        self.holds = 0.0
        self.routers = 0

    async def rebalance(self, wanted: float = 0.0) -> float:
        ask = QuotaAsk("acme", (None, BucketAsk(self.limit, self.holds, wanted), None))
        rebalance = await self._quotas.rebalance(self._name, [ask])
        self.routers = rebalance.routers
        (grant,) = rebalance.grants
        assert grant.changes[0] == grant.changes[2] == 0
        self.holds += grant.changes[1]
        return self.holds


async def test_one_router_holds_everything(quotas: Quotas) -> None:
    """Used amounts are refilled at the limit's rate, by the store's clock, and no further than the limit."""
    router = Router(quotas, "one")
    # The store's clock counts from the rebalance, of which nobody knows when it was but that it came later.
    began = time.monotonic()
    assert await router.rebalance() == pytest.approx(60_000)
    router.holds -= 10_000
    await asyncio.sleep(0.05)
    await router.rebalance()
    passed_ms = (time.monotonic() - began) * 1000
    assert 50_000 + 40 <= router.holds <= 50_000 + passed_ms + 2  # one a millisecond
    router.limit = 30_000
    await router.rebalance()
    assert router.holds == pytest.approx(20_000, abs=passed_ms + 2000)
    assert router.routers == 1


async def test_routers_never_hold_more_than_there_is(quotas: Quotas) -> None:
    """The second comes when the first holds everything; then both hold half of their shares."""
    one, two = Router(quotas, "one"), Router(quotas, "two")
    await one.rebalance()
    assert await two.rebalance() == pytest.approx(0, abs=1)
    for _ in range(3):
        await one.rebalance()
        await two.rebalance()
        assert one.holds + two.holds <= 60_001
    assert one.holds == pytest.approx(15_000, rel=0.01)
    assert two.holds == pytest.approx(15_000, rel=0.01)
    assert await two.rebalance(wanted=40_000) == pytest.approx(40_000, rel=0.01)
    assert await one.rebalance(wanted=60_000) == pytest.approx(20_000, rel=0.01)
    assert one.routers == 2


async def test_debts_are_everybodys(quotas: Quotas) -> None:
    one, two = Router(quotas, "one"), Router(quotas, "two")
    for router in (one, two, one, two):
        await router.rebalance()
    one.holds -= 100_000
    assert await one.rebalance() == 0
    assert await two.rebalance() < 15_001
    two.holds = 0
    assert await two.rebalance(wanted=1) == 0


async def test_what_a_router_held_that_has_ended_is_free(quotas: Quotas) -> None:
    one, two = Router(quotas, "one"), Router(quotas, "two")
    await one.rebalance()
    assert await two.rebalance() == pytest.approx(0, abs=1)
    one.holds -= 20_000
    await one.rebalance()
    await quotas.withdraw("one")
    assert await two.rebalance() == pytest.approx(40_000, rel=0.01)
    assert two.routers == 1


async def _slots(quotas: Quotas, router: str, running: int, wanted: int = 0, most: int = 10) -> int:
    ask = QuotaAsk("acme", (None, None, None), SlotAsk(most, running, wanted))
    return (await quotas.rebalance(router, [ask])).grants[0].slots


async def test_slots(quotas: Quotas) -> None:
    """All for one; with two a part of what is free, more for who wants more, and no more than there are."""
    assert await _slots(quotas, "one", 0) == 10
    assert await _slots(quotas, "two", 0) == 0
    assert await _slots(quotas, "one", 2) == 6
    assert await _slots(quotas, "two", 0) == 2
    assert await _slots(quotas, "two", 2, wanted=9) == 4
    assert await _slots(quotas, "one", 6, most=3) == 6  # what runs, runs on
    await quotas.withdraw("two")
    assert await _slots(quotas, "one", 6) == 10


async def test_a_store_without_its_memory_shares_by_the_number_known(quotas: Quotas) -> None:
    """The router that rebalances first leaves the others their parts."""
    ask = QuotaAsk("acme", (BucketAsk(60, 0.0), None, None), SlotAsk(8, 0))
    rebalance = await quotas.rebalance("one", [ask], known=2)
    (grant,) = rebalance.grants
    assert rebalance.routers == 1
    assert (grant.changes[0], grant.slots) == (15, 4)


async def test_most_tenants_of_a_rebalance(quotas: Quotas) -> None:
    asks = [QuotaAsk(f"t{n}", (BucketAsk(60, 0.0), None, None)) for n in range(MAX_REBALANCED + 1)]
    rebalance = await quotas.rebalance("one", asks[:MAX_REBALANCED])
    assert [grant.changes[0] for grant in rebalance.grants] == [60] * MAX_REBALANCED
    if not isinstance(quotas, MemoryQuotas):
        with pytest.raises(BatonError, match="more than 64 tenants"):
            await quotas.rebalance("one", asks)
