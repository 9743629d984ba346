"""The API keys in Redis, as one reader knows them.

While Redis is away, or has lost its content, the last known keys stay, and their age grows: the reader of
`age_s` decides how old they may be.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from baton.api_keys import ApiKey
from baton.errors import BatonError
from baton.state.keys import POLL_S
from baton.state.redis_keys import KeyListing
from baton.structured_logs import structlog

_log = structlog.get_logger(part="state")


class KeyStore(Protocol):
    """Where keys are read."""

    async def listing(self, known_version: str = "") -> KeyListing:
        """See `RedisKeyStore.listing`."""


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
            listing = await self._store.listing(self._version)
        except BatonError as error:
            self._not_read(error.message)
            return
        if self._version and not listing.version:
            self._not_read("Redis has lost its keys")
            return
        if self._away:
            _log.info("api_keys_read", seconds_away=round(self.age_s, 3))
        self._away, self._read_at = False, asked
        if listing.entries is not None and listing.version:
            self._version = listing.version
            self._take({bytes.fromhex(key.sha256): key for key in listing.entries})

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
