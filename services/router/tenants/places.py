"""Bounded places, of which no tenant can take all.

Dynamic thresholds (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches",
IEEE/ACM Transactions on Networking 6(2), 1998): a tenant may have a multiple of what would still be free. So
a tenant that is alone gets most places, each of several gets about as many as the others, by their weights,
and some stay free for those that come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from baton.base.errors import BatonError, ErrorKind
from services.router.tenants.account import TenantAccount

# Places that a tenant may have for each that is free: 4/5 of all if it is alone, 4/9 each if there are two.
_FOR_EACH_FREE = 4


@dataclass(slots=True)
class _Held:
    amount: int
    weight: float


class Places:
    """Bounded places, `most` of them. Calls that belong to no tenant may take all."""

    def __init__(self, most: int, name: str, waits: str) -> None:
        """`name`: of the limit, among those that refuse a tenant's calls. `waits`: what takes places, for
        messages, such as "requests wait already"."""
        self._most = most
        self._name = name
        self._waits = waits
        self.taken = 0
        # By tenant's name.
        self._held: dict[str, _Held] = {}

    @contextlib.contextmanager
    def hold(self, tenant: TenantAccount | None, amount: int = 1) -> Iterator[None]:
        """Holds places, at least one. Who comes first may take more than there are.

        Raises BatonError: OVERLOADED if too few are free, RATE_LIMITED if the tenant has its share.
        """
        if self.taken and self.taken + amount > self._most:
            raise BatonError(ErrorKind.OVERLOADED, f"{self.taken} {self._waits}")
        if tenant is not None:
            self._take_share(tenant, amount)
        self.taken += amount
        try:
            yield
        finally:
            self.taken -= amount
            if tenant is not None:
                self._give_back(tenant.name, amount)

    def _take_share(self, tenant: TenantAccount, amount: int) -> None:
        held = self._held.get(tenant.name)
        if held is None:
            self._held[tenant.name] = _Held(amount, tenant.weight)
            return
        mean = sum(one.weight for one in self._held.values()) / len(self._held)
        left = self._most - self.taken - amount
        if held.amount + amount > _FOR_EACH_FREE * left * held.weight / mean:
            tenant.refused[self._name] += 1
            message = f"the tenant {tenant.name} has its share: {held.amount} of its {self._waits}"
            raise BatonError(ErrorKind.RATE_LIMITED, message)
        held.amount += amount

    def _give_back(self, tenant: str, amount: int) -> None:
        held = self._held[tenant]
        held.amount -= amount
        if not held.amount:
            del self._held[tenant]
