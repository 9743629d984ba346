"""The members of the registry, as one reader knows them.

An unavailable registry removes no member, and neither does one that returns empty: after an outage or a wipe
members have the duration of a lease to register again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType

from baton.base.errors import BatonError
from baton.state.stores.key_names import LEASE_S, POLL_S
from baton.state.stores.protocols import Registry
from baton.state.stores.records import Listed, Listing, Member


class Roster:
    """Applies listings and failed polls to the known members, without clock or network."""

    def __init__(self, grace_s: float = LEASE_S) -> None:
        self._grace_s = grace_s
        self._epoch: str | None = None
        self._poll_failed = False
        self._grace_ends = 0.0
        self._known: dict[str, Listed] = {}

    @property
    def members(self) -> dict[str, Member]:
        """The known members, by name."""
        return {name: listed.member for name, listed in self._known.items()}

    def poll_failed(self) -> None:
        """Records a poll without an answer; no member is removed."""
        self._poll_failed = True

    def take(self, listing: Listing, now: float) -> bool:
        """Applies a listing that was received at `now` (monotonic seconds); returns whether members
        changed."""
        if self._known and (self._poll_failed or listing.epoch != self._epoch):
            self._grace_ends = now + self._grace_s
        self._poll_failed = False
        self._epoch = listing.epoch
        known = self._known.copy() if now < self._grace_ends else {}
        for listed in listing.entries:
            name = listed.member.name
            # Right after a wipe an old incarnation may register first.
            if name not in known or listed.generation >= known[name].generation:
                known[name] = listed
        changed = known != self._known
        self._known = known
        return changed


class View:
    """Polls the registry; `on_change` is called after every change of `members`."""

    def __init__(
        self,
        registry: Registry,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self._registry = registry
        self._on_change = on_change
        self._roster = Roster()
        self.members: Mapping[str, Member] = MappingProxyType({})

    async def run(self) -> None:
        """Polls until cancelled; run by `State`."""
        while True:
            await self._poll()
            await asyncio.sleep(POLL_S)

    async def _poll(self) -> None:
        try:
            listing = await self._registry.listing()
        except BatonError:
            self._roster.poll_failed()
            return
        changed = self._roster.take(listing, asyncio.get_running_loop().time())
        if changed:
            self.members = MappingProxyType(self._roster.members)
        if changed and self._on_change is not None:
            self._on_change()
