"""Settles what this router holds of the tenants' limits with the other routers, in the background."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping

from baton.errors import BatonError
from baton.state.stores import MAX_SETTLED, Quotas
from services.router.tenants.account import TenantAccount
from services.router.tenants.leased_bucket import SETTLE_S

# Tenants without calls are settled so often, so that others get what they do not use.
_IDLE_S = 2.0


class QuotaLeases:
    """Of one router. `run` until it is cancelled, then `close`."""

    def __init__(
        self,
        quotas: Quotas | None,
        accounts: Callable[[], Mapping[str, TenantAccount]],
        clock: Callable[[], float],
        routers: int = 1,
    ) -> None:
        """`quotas`: None without Redis: each of `routers` processes keeps to its part. `accounts`: of all
        tenants, by name. `clock`: monotonic seconds."""
        self._quotas = quotas
        self._accounts = accounts
        self._clock = clock
        self._routers = routers
        self._router = secrets.token_hex(8)
        # By tenant.
        self._settled_at: dict[str, float] = {}

    async def run(self) -> None:
        """Settles twice a second."""
        while True:
            await self.settle()
            await asyncio.sleep(SETTLE_S)

    async def settle(self) -> None:
        """Settles the tenants that had calls since the last time, and those not settled for long."""
        accounts = self._accounts()
        for account in accounts.values():
            account.lease(self._routers)
        if self._quotas is None:
            return
        now = self._clock()
        before = {name: self._settled_at.get(name, -_IDLE_S) for name in accounts}
        self._settled_at = before
        due = [one for one in accounts.values() if one.touched or now - before[one.name] >= _IDLE_S]
        due = [one for one in due if one.limited]
        try:
            for first in range(0, len(due), MAX_SETTLED):
                await self._settle(self._quotas, due[first : first + MAX_SETTLED], now)
        except BatonError:
            for account in accounts.values():
                account.store_away()

    async def _settle(self, quotas: Quotas, batch: Iterable[TenantAccount], now: float) -> None:
        accounts = list(batch)
        settlement = await quotas.settle(self._router, [account.ask() for account in accounts])
        self._routers = settlement.routers
        for account, grant in zip(accounts, settlement.grants, strict=True):
            account.settled(grant, settlement.routers)
            self._settled_at[account.name] = now

    async def close(self) -> None:
        """Gives up what this router holds, if Redis answers."""
        if self._quotas is not None:
            try:
                await self.settle()
                await self._quotas.withdraw(self._router)
            except BatonError:
                return  # it lapses by itself
