"""Places that tenants share: what each may have, what stays free for others, and that all are given back."""

from __future__ import annotations

import contextlib
import random

import pytest

from baton.base.errors import BatonError, ErrorKind
from services.router.tenants.account import TenantAccount
from services.router.tenants.places import Places
from services.router.tenants.tenants_file import TenantLimits


def tenant(name: str, weight: float = 1.0) -> TenantAccount:
    account = TenantAccount(name, TenantLimits(), lambda: 0.0)
    account.weight = weight
    return account


def fill(places: Places, held: contextlib.ExitStack, one: TenantAccount | None, most: int = 10_000) -> int:
    """Takes places one by one until one is refused; how many there were."""
    for taken in range(most):
        try:
            held.enter_context(places.hold(one))
        except BatonError:
            return taken
    return most


def refusal(places: Places, one: TenantAccount | None, amount: int = 1) -> BatonError:
    with pytest.raises(BatonError) as refused, places.hold(one, amount):
        pass
    return refused.value


def test_without_tenants_all_places_may_be_taken() -> None:
    places = Places(10, "queue_places", "requests wait already")
    with contextlib.ExitStack() as held:
        assert fill(places, held, None) == 10
        refused = refusal(places, None)
        assert (refused.kind, refused.message) == (ErrorKind.OVERLOADED, "10 requests wait already")
    assert places.taken == 0
    with places.hold(None, 100):  # who is first may take more than there are
        assert refusal(places, None).kind is ErrorKind.OVERLOADED


def test_a_tenant_leaves_places_to_others() -> None:
    places, a, b, c = Places(1000, "queue_places", "requests wait already"), *map(tenant, "abc")
    with contextlib.ExitStack() as held:
        assert fill(places, held, a) == 800
        refused = refusal(places, a)
        assert refused.kind is ErrorKind.RATE_LIMITED
        assert refused.message == "the tenant a has its share: 800 of its requests wait already"
        assert fill(places, held, b) == 160
        assert fill(places, held, c) == 32
        assert a.refused == {"queue_places": 2}
        assert refusal(places, b).kind is ErrorKind.RATE_LIMITED
    assert places.taken == 0
    with contextlib.ExitStack() as held:
        assert fill(places, held, a) == 800


def test_several_come_to_shares_by_weight() -> None:
    """Each gives back and takes again in turn, as requests come and end."""
    places, draw = Places(1000, "queue_places", "requests wait already"), random.Random(1)
    tenants = [tenant("a"), tenant("b"), tenant("c", weight=2)]
    counts: dict[str, list[contextlib.ExitStack]] = {one.name: [] for one in tenants}
    for _ in range(20_000):
        one = draw.choice(tenants)
        if counts[one.name] and draw.random() < 0.3:
            counts[one.name].pop().close()
            continue
        stack = contextlib.ExitStack()
        with contextlib.suppress(BatonError):
            stack.enter_context(places.hold(one))
            counts[one.name].append(stack)
    a, b, c = (len(counts[one.name]) for one in tenants)
    assert a == pytest.approx(b, rel=0.1)
    assert c == pytest.approx(2 * a, rel=0.1)
    assert places.taken == a + b + c


def test_a_tenant_that_has_none_gets_one_while_any_is_free() -> None:
    places = Places(3, "queue_places", "requests wait already")
    with contextlib.ExitStack() as held:
        assert fill(places, held, tenant("a")) == 2
        assert fill(places, held, tenant("b")) == 1
        assert refusal(places, tenant("c")).kind is ErrorKind.OVERLOADED


def test_large_amounts() -> None:
    places, a, b = Places(64, "tokenizer_places", "bytes wait"), tenant("a"), tenant("b")
    with places.hold(a, 100):  # alone
        assert refusal(places, b, 1).kind is ErrorKind.OVERLOADED
    with places.hold(a, 40):
        assert refusal(places, a, 20).kind is ErrorKind.RATE_LIMITED
        with places.hold(a, 10), places.hold(b, 14):
            assert refusal(places, b, 1).kind is ErrorKind.OVERLOADED
    assert places.taken == 0
