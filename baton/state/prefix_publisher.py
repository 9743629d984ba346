"""Publishes the contents of a worker's prefix cache to the prefix index, in the background.

It keeps the wanted state instead of a queue: changes that could not be sent are kept, two changes of one
block are merged, and an index that was wiped gets everything again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice

from baton.base.errors import BatonError
from baton.state.client.counters import Counters
from baton.state.stores.key_names import PREFIX_TOUCH_S
from baton.state.stores.protocols import MAX_DELTA, PrefixIndex

# Changes are collected for this long.
_BATCH_DELAY_S = 0.1
_RETRY_S = 0.5
# Most blocks of one worker in the index; further ones are not published.
MAX_BLOCKS = 262_144


class PrefixPublisher:
    """Publishes the cached blocks of `holder` (an incarnation); `add` and `remove` return at once."""

    def __init__(
        self, index: PrefixIndex, counters: Counters, holder: str, max_blocks: int = MAX_BLOCKS
    ) -> None:
        self._index = index
        self._counters = counters
        self._holder = holder
        self._max_blocks = max_blocks
        self._held: dict[bytes, None] = {}
        # hash -> whether the block is cached; changes that were not sent yet.
        self._unsent: dict[bytes, bool] = {}
        # The next batch replaces all that the index has.
        self._fresh = True
        self._wake = asyncio.Event()

    def add(self, hashes: Iterable[bytes]) -> None:
        """Adds blocks that are now cached."""
        for one in hashes:
            if one not in self._held and len(self._held) < self._max_blocks:
                self._held[one] = None
                self._unsent[one] = True
        self._wake.set()

    def remove(self, hashes: Iterable[bytes]) -> None:
        """Removes blocks that were evicted."""
        for one in hashes:
            if one in self._held:
                del self._held[one]
                self._unsent[one] = False
        self._wake.set()
        if len(self._unsent) > 2 * self._max_blocks:
            self._resend_all()  # more changes are pending than there are blocks

    async def run(self) -> None:
        """Sends changes as they come, and refreshes the entry without changes; run by `State`."""
        while True:
            self._wake.clear()
            sent = await self.send()
            await asyncio.sleep(_BATCH_DELAY_S if sent else _RETRY_S)
            if sent and not self._unsent and not self._fresh:
                await self._idle()

    async def _idle(self) -> None:
        try:
            async with asyncio.timeout(PREFIX_TOUCH_S):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _resend_all(self) -> None:
        self._fresh = True
        self._unsent = dict.fromkeys(self._held, True)

    async def send(self) -> bool:
        """Sends one batch of changes; False where the index could not be reached."""
        fresh, self._fresh = self._fresh, False
        batch = dict(islice(self._unsent.items(), MAX_DELTA))
        added = [one for one, held in batch.items() if held]
        removed = [one for one, held in batch.items() if not held]
        try:
            known = await self._index.apply(self._holder, added, removed, fresh=fresh)
        except BatonError:
            self._counters.prefix_publishes_failed += 1
            self._fresh |= fresh
            return False
        if not known:
            self._counters.prefix_resyncs += 1
            self._resend_all()
        if not self._fresh:  # else everything is sent again
            for one, held in batch.items():
                if self._unsent.get(one) is held:
                    del self._unsent[one]
        return True
