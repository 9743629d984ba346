"""Rebalances this router's leases of the tenants' limits with the other routers, in the background."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence

from baton.base.errors import BatonError
from baton.state.stores.protocols import MAX_REBALANCED, Quotas
from services.router.tenants.account import TenantAccount
from services.router.tenants.leased_bucket import REBALANCE_S

# Seconds between two rebalances of tenants without calls, so that others get what they do not use.
_IDLE_S = 2.0
# The others notice a new router with their next rebalance; four, since one may be late.
_JOIN_S = 4 * REBALANCE_S


class QuotaLeases:
    """One router's part of the limits of all tenants. `run` until it is cancelled, then `close`."""

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
        self._rebalanced_at: dict[str, float] = {}
        # On `clock`; None before the first rebalance.
        self._joins_at: float | None = None

    @property
    def joined(self) -> bool:
        """True if this router holds its part of the limits: at once if it is alone, else once the others have
        had the time to give it up."""
        return self._joins_at is not None and self._clock() >= self._joins_at

    async def run(self, rebalanced: Callable[[], None]) -> None:
        """Rebalances twice a second; calls `rebalanced` after each time."""
        while True:
            await self.rebalance()
            rebalanced()
            await asyncio.sleep(REBALANCE_S)

    async def rebalance(self) -> None:
        """Rebalances the leases of the tenants that had calls since the last time, and of those not
        rebalanced for long; all of them while this router joins the others or another one does, so that the
        parts become equal."""
        accounts = self._accounts()
        for account in accounts.values():
            account.lease(self._routers)
        if self._quotas is None:
            self._joins_at = self._clock()
            return
        now = self._clock()
        before = {name: self._rebalanced_at.get(name, -_IDLE_S) for name in accounts}
        self._rebalanced_at = before
        limited = [one for one in accounts.values() if one.limited]
        joins = not self.joined
        due = [one for one in limited if joins or one.touched or now - before[one.name] >= _IDLE_S]
        routers = self._routers
        try:
            await self._rebalance_all(self._quotas, due, now)
            if self._routers > routers:
                await self._rebalance_all(self._quotas, limited, now)
        except BatonError:
            for account in accounts.values():
                account.store_away()
        if self._joins_at is None:
            self._joins_at = now + (0.0 if self._routers == 1 else _JOIN_S)

    async def _rebalance_all(self, quotas: Quotas, due: Sequence[TenantAccount], now: float) -> None:
        """Rebalances these tenants, in batches; without any it only learns how many routers there are."""
        for first in range(0, max(1, len(due)), MAX_REBALANCED):
            batch = due[first : first + MAX_REBALANCED]
            asks = [account.ask() for account in batch]
            rebalance = await quotas.rebalance(self._router, asks, self._routers)
            self._routers = rebalance.routers
            for account, grant in zip(batch, rebalance.grants, strict=True):
                account.rebalanced(grant, rebalance.routers)
                self._rebalanced_at[account.name] = now

    async def close(self) -> None:
        """Gives up what this router holds, if Redis answers."""
        if self._quotas is not None:
            try:
                await self.rebalance()
                await self._quotas.withdraw(self._router)
            except BatonError:
                return  # it lapses by itself
