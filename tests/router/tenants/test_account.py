"""Limits of a tenant: what they admit, when a refusal says to come back, and that nothing stays reserved."""

from __future__ import annotations

import contextlib
import random

import pytest

from baton.base.errors import BatonError, ErrorKind
from services.router.tenants.account import CallCost, TenantAccount
from services.router.tenants.tenants_file import TenantLimits
from tests.router.tenants.clock import Clock


def account(clock: Clock, **limits: int) -> TenantAccount:
    return TenantAccount("acme", TenantLimits.model_validate(limits), clock)


def run(one: TenantAccount, cost: CallCost, used: int = 0) -> None:
    """A call that ends at once, after `used` output tokens."""
    with one.admit(cost) as permit:
        permit.output_tokens += used


def refusal(one: TenantAccount, cost: CallCost) -> BatonError:
    with pytest.raises(BatonError) as refused, one.admit(cost):
        pass
    return refused.value


@pytest.mark.parametrize(
    ("limit", "cost"),
    [
        ("requests_per_minute", CallCost(1, 1)),
        ("prompt_tokens_per_minute", CallCost(1, 100)),
        ("output_tokens_per_minute", CallCost(100, 1)),
    ],
)
def test_a_limit_a_minute(limit: str, cost: CallCost) -> None:
    clock = Clock()
    one = account(clock, **{limit: 6})
    for _ in range(6):
        run(one, cost, used=cost.output_tokens)
    refused = refusal(one, cost)
    assert refused.kind is ErrorKind.RATE_LIMITED
    assert f"acme has reached its limit {limit} = 6" in refused.message
    assert refused.retry_after_s == pytest.approx(10)
    clock.now += 9.9
    assert refusal(one, cost).retry_after_s == pytest.approx(0.1)
    clock.now += 0.1
    run(one, cost, used=cost.output_tokens)
    assert one.refused == {limit: 2}
    assert one.calls == 7


def test_a_refusal_has_the_exact_time_of_the_retry() -> None:
    clock, draw = Clock(), random.Random(7)
    one = account(clock, requests_per_minute=50, prompt_tokens_per_minute=3_000, output_tokens_per_minute=900)
    refusals = 0
    for _ in range(500):
        cost = CallCost(draw.randrange(1, 5_000), draw.randrange(1, 1_500))
        try:
            run(one, cost, used=draw.randrange(cost.output_tokens + 1))
        except BatonError as error:
            refusals += 1
            clock.now += error.retry_after_s * 0.99
            refusal(one, cost)
            clock.now += error.retry_after_s * 0.01
            run(one, cost)
    assert refusals > 100


def test_what_was_not_used_is_given_back() -> None:
    one = account(Clock(), output_tokens_per_minute=100)
    run(one, CallCost(1, 90), used=10)
    run(one, CallCost(1, 90), used=90)
    assert refusal(one, CallCost(1, 1)).retry_after_s == pytest.approx(0.6)
    assert one.output_tokens == 100


def test_more_than_a_minutes_tokens_need_a_full_bucket_and_are_owed() -> None:
    clock = Clock()
    one = account(clock, output_tokens_per_minute=60)
    run(one, CallCost(1, 180), used=180)
    clock.now = 120.0
    assert refusal(one, CallCost(1, 180)).retry_after_s == pytest.approx(60)
    clock.now = 180.0
    run(one, CallCost(1, 180), used=180)


def test_concurrent_requests() -> None:
    one = account(Clock(), concurrent_requests=3)
    with one.admit(CallCost(outputs=2)), one.admit(CallCost()):
        assert one.running == 3
        refused = refusal(one, CallCost())
        assert (refused.kind, refused.retry_after_s) == (ErrorKind.RATE_LIMITED, 1.0)
    assert one.running == 0
    run(one, CallCost(outputs=3))
    assert refusal(one, CallCost(outputs=4)).kind is ErrorKind.INVALID  # at any time


def test_a_refused_or_failed_call_leaves_nothing_reserved() -> None:
    one = account(Clock(), requests_per_minute=2, output_tokens_per_minute=100, concurrent_requests=1)
    with contextlib.suppress(RuntimeError), one.admit(CallCost(1, 100)):
        raise RuntimeError
    with one.admit(CallCost(1, 1)):
        refusal(one, CallCost(1, 1))  # the requests and concurrency
    assert one.running == 0
    assert one.refused == {"requests_per_minute": 1}
    one.set_limits(TenantLimits(output_tokens_per_minute=100))
    run(one, CallCost(1, 100))


def test_new_limits_keep_what_was_used() -> None:
    one = account(Clock(), requests_per_minute=10)
    for _ in range(4):
        run(one, CallCost())
    one.set_limits(TenantLimits(requests_per_minute=5))
    run(one, CallCost())
    refusal(one, CallCost())
    one.set_limits(TenantLimits())
    run(one, CallCost())


def test_checking_takes_nothing() -> None:
    one = account(Clock(), requests_per_minute=1)
    for _ in range(3):
        one.check()
    run(one, CallCost())
    with pytest.raises(BatonError):
        one.check()
