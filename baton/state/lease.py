"""A process's own entry in the registry, renewed for as long as it runs."""

from __future__ import annotations

import asyncio
import random

from baton.base.errors import BatonError, NameTakenError
from baton.base.structured_logs import structlog
from baton.state.client.counters import Counters
from baton.state.stores.key_names import LEASE_S, RENEW_S
from baton.state.stores.protocols import Registry
from baton.state.stores.records import Member

# Pause after a failed renewal; randomised, so that processes do not retry at the same time.
_RETRY_S = 0.4

_log = structlog.get_logger(part="state")


class Lease:
    """Registers `member` and renews its lease every second, also after outages of Redis."""

    def __init__(self, registry: Registry, counters: Counters, member: Member) -> None:
        self._registry = registry
        self._counters = counters
        self._generation = 0
        self._changed = asyncio.Event()
        # Serialises renewals and the withdrawal, so that a renewal cannot arrive last.
        self._turn = asyncio.Lock()
        # Whether `withdraw` was called.
        self.withdrawn = False
        self.member = member
        # What Redis was given last.
        self.announced: Member | None = None
        # Set while Redis has this lease, as far as is known.
        self.registered = asyncio.Event()
        # Set once another worker has the name, which `taken` names: this process should exit.
        self.replaced = asyncio.Event()
        self.taken: NameTakenError | None = None
        # Until when a first announcement is repeated where another worker keeps the name.
        self._kept_until: float | None = None

    def update(self, member: Member) -> None:
        """Registers a changed description of the same incarnation at once."""
        if (member.name, member.incarnation) != (self.member.name, self.member.incarnation):
            raise ValueError("a lease belongs to one incarnation")
        self.member = member
        self._changed.set()

    async def withdraw(self) -> None:
        """Ends the lease. Raises BatonError(UNAVAILABLE) where Redis does not answer; the lease then
        expires."""
        self.withdrawn = True
        self._changed.set()
        async with self._turn:
            self.registered.clear()
            await self._registry.withdraw(self.member.name, self.member.incarnation)

    async def run(self) -> None:
        """Renews until withdrawn or replaced; run by `State`."""
        while not self.withdrawn and not self.replaced.is_set():
            self._changed.clear()
            pause = RENEW_S if await self._renew() else _RETRY_S
            try:
                async with asyncio.timeout(pause * random.uniform(0.75, 1.0)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _renew(self) -> bool:
        async with self._turn:
            if self.withdrawn:
                return False
            try:
                member, generation = self.member, self._generation
                self._generation = await self._registry.announce(member, generation, LEASE_S)
            except BatonError as error:
                self._failed(error)
                return False
            self.announced = member
            self.registered.set()
            return True

    def _failed(self, error: BatonError) -> None:
        self.registered.clear()
        self._counters.renewals_failed += 1
        if not isinstance(error, NameTakenError) or (error.kept and self._may_lapse()):
            return
        name, where = self.member.name, {"host": error.host, "address": error.address}
        if error.kept:
            _log.error("name_taken", member=name, **where)
        else:
            _log.error("replaced_by_newer_incarnation", member=name, **where)
        self.taken = error
        self.replaced.set()

    def _may_lapse(self) -> bool:
        """True if the lease that keeps the name may still be that of a worker that has ended."""
        now = asyncio.get_running_loop().time()
        self._kept_until = self._kept_until or now + LEASE_S + RENEW_S
        return now < self._kept_until
