"""`stores.Quotas` in memory, on any clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.base.errors import BatonError, ErrorKind
from baton.state.stores.key_names import QUOTA_LEASE_S
from baton.state.stores.records import BucketAsk, QuotaAsk, QuotaGrant, Rebalance, SlotAsk


@dataclass
class _Bucket:
    limit: float
    level: float
    at: float
    holds: dict[str, float] = field(default_factory=dict)


class MemoryQuotas:
    """Quotas with the rules of the Redis script, in Python. `unavailable` makes every call fail."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: the present time in seconds."""
        self._clock = clock
        self.unavailable = False
        self._leases: dict[str, float] = {}
        self._buckets: dict[tuple[str, int], _Bucket] = {}
        self._slots: dict[str, dict[str, int]] = {}

    def wipe(self) -> None:
        """Forgets everything, as a Redis that has started again."""
        self._leases, self._buckets, self._slots = {}, {}, {}

    async def rebalance(self, router: str, asks: Sequence[QuotaAsk], known: int = 1) -> Rebalance:
        if self.unavailable:
            raise BatonError(ErrorKind.UNAVAILABLE, "the in-memory store is unavailable")
        now = self._clock()
        self._leases[router] = now + QUOTA_LEASE_S
        self._leases = {name: end for name, end in self._leases.items() if end > now}
        count = max(known, len(self._leases))
        grants = []
        for ask in asks:
            changes = tuple(
                0.0 if bucket is None else self._rebalance_bucket((ask.tenant, number), bucket, router, count)
                for number, bucket in enumerate(ask.buckets)
            )
            slots = 0 if ask.slots is None else self._rebalance_slots(ask.tenant, ask.slots, router, count)
            grants.append(QuotaGrant(changes, slots))
        return Rebalance(len(self._leases), tuple(grants))

    async def withdraw(self, router: str) -> None:
        self._leases.pop(router, None)

    def _rebalance_bucket(self, key: tuple[str, int], ask: BucketAsk, router: str, count: int) -> float:
        now = self._clock()
        new = _Bucket(ask.per_minute, ask.per_minute - max(0.0, ask.balance), now)
        bucket = self._buckets.setdefault(key, new)
        freed = sum(hold for name, hold in bucket.holds.items() if name not in self._leases)
        bucket.holds = {name: hold for name, hold in bucket.holds.items() if name in self._leases}
        others = sum(hold for name, hold in bucket.holds.items() if name != router)
        refilled = freed + (now - bucket.at) * bucket.limit / 60 + ask.per_minute - bucket.limit
        level = min(bucket.level + refilled, ask.per_minute - others - ask.balance)
        left = level + ask.balance
        share = left if count == 1 else (left + others) / (2 * count)
        hold = max(0.0, min(left, max(share, ask.wanted)))
        bucket.limit, bucket.level, bucket.at = ask.per_minute, left - hold, now
        bucket.holds[router] = hold
        return hold - ask.balance

    def _rebalance_slots(self, tenant: str, ask: SlotAsk, router: str, count: int) -> int:
        held = self._slots.setdefault(tenant, {})
        for name in held.keys() - self._leases.keys():
            del held[name]
        free = max(0, ask.most - sum(slots for name, slots in held.items() if name != router))
        share = free if count == 1 else max(1, math.floor((free - ask.running) / count))
        held[router] = max(ask.running, min(free, max(ask.running + share, ask.wanted)))
        return held[router]
