"""The API keys in Redis, as one reader knows them.

While Redis is away, has lost its content, or has keys that are not signed, the last known keys stay, and
their age grows: the reader of `age_s` decides how old they may be. Redis may also go back, after a failover
to a replica that lagged or from a backup: then the last known keys are newer, and stay until they change.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from baton.base.api_keys import ApiKey
from baton.base.errors import BatonError
from baton.base.structured_logs import structlog
from baton.state.stores.key_names import POLL_S
from baton.state.stores.redis_api_keys import KeyListing

_log = structlog.get_logger(part="state")


class KeyStore(Protocol):
    """A source of API keys, such as `RedisKeyStore`."""

    async def listing(self, known_version: str = "") -> KeyListing:
        """Returns the keys and their version, as `RedisKeyStore.listing` does."""


class KeyView:
    """Polls the keys; `on_change` is called with those that are new and those that are gone."""

    def __init__(
        self,
        store: KeyStore,
        on_change: Callable[[list[ApiKey], list[ApiKey]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: monotonic seconds."""
        self._store = store
        self._on_change = on_change
        self._clock = clock
        self._version = ""
        self._read_at = -math.inf
        self._away = False
        self._generation = 0
        # The version of an earlier set to which Redis has gone back; empty where it has not.
        self._refused = ""
        # By SHA-256.
        self.keys: Mapping[bytes, ApiKey] = MappingProxyType({})

    @property
    def age_s(self) -> float:
        """Seconds for which a change in Redis may be unknown; infinite before the first answer."""
        return self._clock() - self._read_at

    async def run(self) -> None:
        """Polls until cancelled; run by `State`."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Reads the keys if they have changed."""
        asked = self._clock()
        try:
            listing = await self._store.listing(self._refused or self._version)
        except BatonError as error:
            self._not_read(error.message)
            return
        if self._version and not listing.version:
            self._not_read("Redis has lost its keys")
            return
        if self._goes_back(listing):
            self._read_at = asked
            return
        if self._away:
            _log.info("api_keys_read", seconds_away=round(self.age_s, 3))
        self._away, self._refused, self._read_at = False, "", asked
        if listing.entries is not None and listing.version:
            self._version, self._generation = listing.version, listing.generation
            self._take({bytes.fromhex(key.sha256): key for key in listing.entries})

    def _goes_back(self, listing: KeyListing) -> bool:
        """True if Redis has keys of an earlier generation, one of which may have been revoked since."""
        if listing.entries is None:
            return bool(self._refused)
        if listing.generation >= self._generation:
            return False
        if not self._refused:
            known, keys = self._generation, len(self.keys)
            _log.error("api_keys_went_back", generation=listing.generation, known=known, keys=keys)
        self._refused = listing.version
        return True

    def _not_read(self, reason: str) -> None:
        if not self._away:
            _log.warning("api_keys_not_read", reason=reason, keys=len(self.keys))
        self._away = True

    def _take(self, keys: dict[bytes, ApiKey]) -> None:
        before, self.keys = self.keys, MappingProxyType(keys)
        added = [key for hashed, key in keys.items() if before.get(hashed) != key]
        gone = [key for hashed, key in before.items() if hashed not in keys]
        if self._on_change is not None and (added or gone):
            self._on_change(added, gone)
