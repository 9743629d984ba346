"""A member's own entry in the registry, kept alive for as long as the process runs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

import structlog

from baton.errors import BatonError, ErrorKind
from baton.state.counters import Counters
from baton.state.keys import LEASE_S, RENEW_S
from baton.state.records import Member
from baton.state.stores import LoadHints, Registry

# After a failed renewal: soon again, but not everybody at once.
_AGAIN_S = 0.4

_log = structlog.get_logger(part="state")


class Lease:
    """Announces `member` and goes on doing so every second, whatever happens to Redis.

    With `load`, each renewal also publishes what it returns as the member's load hint.
    """

    def __init__(
        self,
        registry: Registry,
        hints: LoadHints,
        counters: Counters,
        member: Member,
        load: Callable[[], Mapping[str, int]] | None = None,
        renew_s: float = RENEW_S,
        lease_s: float = LEASE_S,
    ) -> None:
        self._registry = registry
        self._hints = hints
        self._counters = counters
        self._load = load
        self._renew_s = renew_s
        self._lease_s = lease_s
        self._generation = 0
        self._changed = asyncio.Event()
        # A renewal on its way must not arrive after the withdrawal.
        self._turn = asyncio.Lock()
        self._withdrawn = False
        self.member = member
        # Set while Redis has this lease, as far as we know.
        self.registered = asyncio.Event()
        # Set once a newer incarnation has our name: this process is a ghost and should end.
        self.replaced = asyncio.Event()

    def update(self, member: Member) -> None:
        """Announces another description of the same incarnation, at once."""
        if (member.name, member.incarnation) != (self.member.name, self.member.incarnation):
            raise ValueError("a lease is of one incarnation")
        self.member = member
        self._changed.set()

    @property
    def withdrawn(self) -> bool:
        """Whether it was ended."""
        return self._withdrawn

    async def withdraw(self) -> None:
        """Ends the lease; BatonError(UNAVAILABLE) where Redis could not be told (it lapses then)."""
        self._withdrawn = True
        self._changed.set()
        async with self._turn:
            self.registered.clear()
            await self._registry.withdraw(self.member.name, self.member.incarnation)

    async def run(self) -> None:
        """Renews until withdrawn or replaced; owned by `State`."""
        while not self._withdrawn and not self.replaced.is_set():
            self._changed.clear()
            renewed = await self._renew()
            if renewed:
                await self._publish_load()
            pause = self._renew_s if renewed else _AGAIN_S
            try:
                async with asyncio.timeout(pause * random.uniform(0.75, 1.0)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _renew(self) -> bool:
        async with self._turn:
            if self._withdrawn:
                return False
            try:
                member, generation = self.member, self._generation
                self._generation = await self._registry.announce(member, generation, self._lease_s)
            except BatonError as error:
                self._failed(error)
                return False
            self.registered.set()
            return True

    def _failed(self, error: BatonError) -> None:
        self.registered.clear()
        self._counters.renewals_failed += 1
        if error.kind is ErrorKind.CONFLICT:
            _log.error("replaced_by_newer_incarnation", member=self.member.name)
            self.replaced.set()

    async def _publish_load(self) -> None:
        if self._load is None:
            return
        try:
            await self._hints.publish(self.member.name, self.member.incarnation, self._load())
        except BatonError:
            self._counters.hints_failed += 1
