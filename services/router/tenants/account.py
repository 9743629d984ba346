"""Accounts of tenants: what each uses at this router, and whether it may use more. The one place where limits
are judged."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.base.errors import BatonError, ErrorKind
from baton.state.stores.records import QuotaAsk, QuotaGrant, SlotAsk
from services.router.tenants.leased_bucket import LeasedBucket
from services.router.tenants.tenants_file import TenantLimits
from services.router.tenants.token_bucket import TokenBucket

# When a running request ends is not known, so `Retry-After` is a constant.
_CONCURRENT_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class CallCost:
    """The cost of one call of a client. `outputs`: requests that it makes. `output_tokens`: at most, of all
    outputs together."""

    prompt_tokens: int = 1
    output_tokens: int = 1
    outputs: int = 1

    @property
    def per_minute(self) -> dict[str, int]:
        """The cost by each limit per minute."""
        return {
            "requests_per_minute": 1,
            "prompt_tokens_per_minute": self.prompt_tokens,
            "output_tokens_per_minute": self.output_tokens,
        }


_LEAST = CallCost()


@dataclass(slots=True)
class Permit:
    """A running call's share of its tenant's limits."""

    # Output tokens so far. The rest of what was reserved is given back at the call's end.
    output_tokens: int = 0


class TenantAccount:
    """The account of one tenant. All counts are since it was made."""

    def __init__(self, name: str, limits: TenantLimits, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self.name = name
        # Its share of the waiting queue, relative to others', and the priority of its requests.
        self.weight = 1.0
        self.priority = 0
        # When one of its requests was placed last, on the event loop's clock.
        self.placed_at = -math.inf
        self._clock = clock
        self._buckets: dict[str, TokenBucket | LeasedBucket] = {}
        # How many routers share the limits; None: this one has them alone.
        self._routers: int | None = None
        # How many outputs may run here, and need to; of shared limits.
        self._slots: int | None = None
        self._slots_wanted = 0
        # Whether something has happened since `ask`.
        self.touched = False
        self.set_limits(limits)
        self.running = 0
        self.calls = 0
        # Requests that wait for workers now; those that were placed, and seconds that they waited.
        self.waiting = 0
        self.placed = 0
        self.waited_s = 0.0
        self.prompt_tokens = 0
        self.output_tokens = 0
        # Calls that a limit refused, by its name.
        self.refused: Counter[str] = Counter()

    def set_limits(self, limits: TenantLimits) -> None:
        """Changes the limits; what was used so far stays used."""
        self._limits = limits
        for name in _LEAST.per_minute:
            per_minute = getattr(limits, name)
            if per_minute is None:
                self._buckets.pop(name, None)
            elif name in self._buckets:
                self._buckets[name].resize(per_minute)
            elif self._routers is None:
                self._buckets[name] = TokenBucket(per_minute, self._clock)
            else:
                self._buckets[name] = LeasedBucket(per_minute, self._clock, self._routers)

    @property
    def limited(self) -> bool:
        """True if the tenant has any limit."""
        return bool(self._buckets) or self._limits.concurrent_requests is not None

    def lease(self, routers: int) -> None:
        """Shares the limits among several routers from now on. What was used stays used."""
        if self._routers is not None:
            return
        self._routers = routers
        for name, bucket in self._buckets.items():
            if isinstance(bucket, TokenBucket):
                per_minute = getattr(self._limits, name)
                self._buckets[name] = LeasedBucket(per_minute, self._clock, routers, bucket.used)
        if (most := self._limits.concurrent_requests) is not None:
            self._slots = max(1, most // routers)

    def ask(self) -> QuotaAsk:
        """Returns the request to the store for shares of the limits, with what is used of them."""
        self.touched = False
        buckets = (self._buckets.get(name) for name in _LEAST.per_minute)
        most = self._limits.concurrent_requests
        return QuotaAsk(
            self.name,
            tuple(one.ask() if isinstance(one, LeasedBucket) else None for one in buckets),
            None if most is None else SlotAsk(most, self.running, self._slots_wanted),
        )

    def rebalanced(self, grant: QuotaGrant, routers: int) -> None:
        """Applies the store's answer to `ask`: what the tenant may use from now on."""
        for name, change in zip(_LEAST.per_minute, grant.changes, strict=True):
            if isinstance(bucket := self._buckets.get(name), LeasedBucket):
                bucket.rebalanced(change, routers)
        self._slots = grant.slots
        self._slots_wanted = 0

    def store_away(self) -> None:
        """Records that the store does not answer: rates go on by this router's part, slots stay as they
        are."""
        for bucket in self._buckets.values():
            if isinstance(bucket, LeasedBucket):
                bucket.store_away()

    def check(self, cost: CallCost = _LEAST) -> None:
        """Raises BatonError(RATE_LIMITED) where a call of this cost would exceed a limit, with the time after
        which none would refuse it; BatonError(INVALID) where it has more outputs than may ever run.

        Takes nothing. Without a cost: whether the smallest call would be refused.
        """
        self.touched = True
        waits = {name: self._buckets[name].wait_s(cost.per_minute[name]) for name in self._buckets}
        most = self._limits.concurrent_requests
        if most is not None:
            if cost.outputs > most:
                message = f"{cost.outputs} outputs in a call; the tenant {self.name} may run {most} at a time"
                raise BatonError(ErrorKind.INVALID, message)
            allowed = most if self._slots is None else min(most, self._slots)
            if self.running + cost.outputs > allowed:
                self._slots_wanted = max(self._slots_wanted, self.running + cost.outputs)
                waits["concurrent_requests"] = _CONCURRENT_RETRY_S
        if not any(waits.values()):
            return
        name = max(waits, key=waits.__getitem__)
        self.refused[name] += 1
        message = f"the tenant {self.name} has reached its limit {name} = {getattr(self._limits, name)}"
        raise BatonError(ErrorKind.RATE_LIMITED, message, retry_after_s=waits[name])

    @contextlib.contextmanager
    def count_wait(self, since: float) -> Iterator[None]:
        """Counts a request that waits for workers for the first time; `since`: on the event loop's clock."""
        self.waiting += 1
        try:
            yield
            self.placed += 1
            self.waited_s += asyncio.get_running_loop().time() - since
        finally:
            self.waiting -= 1

    @contextlib.contextmanager
    def admit(self, cost: CallCost) -> Iterator[Permit]:
        """Holds a call's share of the limits while it runs. Raises as `check` does; then it takes nothing."""
        self.check(cost)
        for name, bucket in self._buckets.items():
            bucket.take(cost.per_minute[name])
        self.running += cost.outputs
        self.calls += 1
        self.prompt_tokens += cost.prompt_tokens
        permit = Permit()
        try:
            yield permit
        finally:
            self.touched = True
            self.running -= cost.outputs
            self.output_tokens += permit.output_tokens
            if (reserved := self._buckets.get("output_tokens_per_minute")) is not None:
                reserved.give_back(cost.output_tokens - permit.output_tokens)
